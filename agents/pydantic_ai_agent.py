"""The framework `pydantic-ai`, unmodified: adds three numbers with a plain tool. Train it: task.agent=agents/pydantic_ai_agent.py"""
import random, re
import openai
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from molt_nb.agents import ChatAgent

def add(a: int, b: int) -> str:
    "The sum of two numbers."
    return str(a + b)

class Adder(ChatAgent):
    @classmethod
    def tasks(cls, n, seed, low=1, high=9):
        rng = random.Random(seed); numbers = [[rng.randint(low, high) for _ in range(3)] for _ in range(n)]
        return [dict(id=f'add-{seed}-{i}', numbers=x) for i, x in enumerate(numbers)]

    async def run(self, chat, task):
        a, b, c = task['numbers']
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            agent = Agent(OpenAIChatModel(chat.model, provider=OpenAIProvider(openai_client=client)), tools=[add], retries=2)
            try: result = await agent.run(f'What is {a} + {b} + {c}?', usage_limits=UsageLimits(request_limit=4))
            except (UsageLimitExceeded, UnexpectedModelBehavior): return 0.0        # too many turns, or too many bad calls: the model's doing
        found = re.findall(r'-?\d+', result.output)
        return float(bool(found) and int(found[-1]) == a + b + c), dict(requests=result.usage.requests)
