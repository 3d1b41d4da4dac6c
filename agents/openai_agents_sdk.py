"""The framework `openai-agents`, unmodified: adds three numbers with a function tool. It keeps its own loop, on Chat Completions or (options: wire=responses) on Responses.
Train it: task.agent=agents/openai_agents_sdk.py"""
import random, re
import openai
from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from molt_nb.agents import ChatAgent

set_tracing_disabled(True)      # it would send what it does to a service

@function_tool
def add(a: int, b: int) -> str:
    "The sum of two numbers."
    return str(a + b)

class Adder(ChatAgent):
    model = OpenAIChatCompletionsModel

    @classmethod
    def tasks(cls, n, seed, low=1, high=9):
        rng = random.Random(seed); numbers = [[rng.randint(low, high) for _ in range(3)] for _ in range(n)]
        return [dict(id=f'add-{seed}-{i}', numbers=x) for i, x in enumerate(numbers)]

    async def run(self, chat, task):
        a, b, c = task['numbers']
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            agent = Agent('adder', tools=[add], model=self.model(chat.model, client))
            try: result = await Runner.run(agent, f'What is {a} + {b} + {c}?', max_turns=4)
            except (MaxTurnsExceeded, ModelBehaviorError): return 0.0        # too many turns, or a call of what is no tool: the model's doing
        found = re.findall(r'-?\d+', result.final_output)
        return float(bool(found) and int(found[-1]) == a + b + c), dict(calls=sum(i.type == 'tool_call_item' for i in result.new_items))

class AdderOnResponses(Adder):
    "The same over OpenAI's Responses."
    model = OpenAIResponsesModel
