"An agent with OpenAI's async SDK: adds three numbers with a tool. Train it: task.agent=agents/openai_adder.py"
import json, random, re
import openai
from molt_nb.agents import ChatAgent

ADD = dict(type='function', function=dict(name='add', description='The sum of two numbers.', parameters=dict(
    type='object', properties=dict(a=dict(type='integer'), b=dict(type='integer')), required=['a', 'b'])))

def add(arguments):
    "The tool: a message for the model, whatever it wrote."
    try: a = json.loads(arguments); return str(int(a['a']) + int(a['b']))
    except (ValueError, KeyError, TypeError): return 'Error: write {"a": 1, "b": 2}'

class Adder(ChatAgent):
    @classmethod
    def tasks(cls, n, seed, low=1, high=9):
        rng = random.Random(seed); numbers = [[rng.randint(low, high) for _ in range(3)] for _ in range(n)]
        return [dict(id=f'add-{seed}-{i}', numbers=x) for i, x in enumerate(numbers)]

    async def run(self, chat, task):
        a, b, c = task['numbers']; messages = [dict(role='user', content=f'What is {a} + {b} + {c}?')]
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            for _ in range(4):
                choice = (await client.chat.completions.create(model=chat.model, messages=messages, tools=[ADD])).choices[0]
                messages.append(choice.message.model_dump(exclude_none=True, include={'role', 'content', 'tool_calls'}))
                for call in choice.message.tool_calls or (): messages.append(dict(role='tool', tool_call_id=call.id, content=add(call.function.arguments)))
                if not choice.message.tool_calls: break
        found = re.findall(r'-?\d+', choice.message.content or '')
        return float(bool(found) and int(found[-1]) == a + b + c), dict(calls=sum(m['role'] == 'tool' for m in messages))
