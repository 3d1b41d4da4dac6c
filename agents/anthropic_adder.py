"The same agent with Anthropic's SDK, blocking: `run` is a plain function, and that is fine. Train it: task.agent=agents/anthropic_adder.py"
import random, re
import anthropic
from molt_nb.agents import ChatAgent

ADD = dict(name='add', description='The sum of two numbers.', input_schema=dict(
    type='object', properties=dict(a=dict(type='integer'), b=dict(type='integer')), required=['a', 'b']))

class Adder(ChatAgent):
    @classmethod
    def tasks(cls, n, seed, low=1, high=9):
        rng = random.Random(seed); numbers = [[rng.randint(low, high) for _ in range(3)] for _ in range(n)]
        return [dict(id=f'add-{seed}-{i}', numbers=x) for i, x in enumerate(numbers)]

    def run(self, chat, task):
        a, b, c = task['numbers']; messages = [dict(role='user', content=f'What is {a} + {b} + {c}?')]
        with anthropic.Anthropic(base_url=chat.base_url, api_key=chat.api_key) as client:
            for _ in range(4):
                answer = client.messages.create(model=chat.model, max_tokens=64, messages=messages, tools=[ADD])
                messages.append(dict(role='assistant', content=[block.model_dump(exclude_none=True) for block in answer.content]))
                calls = [block for block in answer.content if block.type == 'tool_use']
                if not calls: break
                messages.append(dict(role='user', content=[dict(type='tool_result', tool_use_id=call.id, content=self.add(call.input)) for call in calls]))
        found = re.findall(r'-?\d+', ''.join(block.text for block in answer.content if block.type == 'text'))
        return float(bool(found) and int(found[-1]) == a + b + c)

    @staticmethod
    def add(arguments):
        try: return str(int(arguments['a']) + int(arguments['b']))
        except (ValueError, KeyError, TypeError): return 'Error: write {"a": 1, "b": 2}'
