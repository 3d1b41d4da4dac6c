"""An agent that keeps its own loop: it splits a long sum into questions of three numbers, asks each of them twice (in a long conversation that it compacts,
and in a short one of a helper), writes what it found into a notebook, and adds up the notebook in the end.

It does to its history what agents do, and knows nothing of tokens. With OpenAI's SDK or with Anthropic's, it is the same agent:

    task.agent=agents/compacting.py:OnOpenAI        limits.max_turns=40 limits.max_row_tokens=512 engine.max_model_len=512
    task.agent=agents/compacting.py:OnAnthropic
"""
import asyncio
import json
import random
import re
from dataclasses import dataclass, field

import anthropic
import openai

from molt_nb.agents import ChatAgent

ADD = dict(type='object', properties=dict(a=dict(type='integer'), b=dict(type='integer')), required=['a', 'b'])


@dataclass
class Call:
    "A tool call of the model."
    id: str
    name: str
    arguments: object        # a dict, unless the model wrote something else


@dataclass
class Message:
    "One message, in this agent's own form."
    role: str                # user | assistant | tool
    text: str
    calls: list = field(default_factory=list)
    answers: str = ''        # of a tool's message: the id of the call


class BadReply(Exception):
    "The model's turn cannot be used."


# ---- the tool -----------------------------------------------------------------------------------

def add(call):
    "What the tool says; BadReply for a call that it cannot run."
    if call.name != 'add':
        raise BadReply(f'there is no tool {call.name}')
    try:
        return str(int(call.arguments['a']) + int(call.arguments['b']))
    except (KeyError, TypeError, ValueError):
        raise BadReply('write {"a": 1, "b": 2}') from None


def question(numbers):
    return f'What is {" + ".join(map(str, numbers))}?'


# ---- the loop -----------------------------------------------------------------------------------

class Loop:
    "What both SDKs share. A subclass has `connect(chat)` and `ask(history)`."
    max_steps = 4            # turns for one question
    max_tries = 3            # samples of one turn, where the reply is malformed
    max_chars = 60           # of the history; then it is compacted

    @classmethod
    def tasks(cls, n, seed, low=1, high=9, parts=3):
        rng = random.Random(seed)
        numbers = [[[rng.randint(low, high) for _ in range(3)] for _ in range(parts)] for _ in range(n)]
        return [dict(id=f'long-sum-{seed}-{i}', parts=x) for i, x in enumerate(numbers)]

    async def run(self, chat, task):
        self.model, self.tries, self.compactions = chat.model, 0, 0
        notebook, history = {}, []
        async with self.connect(chat) as self.client:
            for part in task['parts']:
                await self.find_out(part, notebook, history)
                history = self.compact(history, notebook)
            subtotals = [notebook[question(part)] for part in task['parts']]
            if None not in subtotals:
                await self.find_out(subtotals, notebook, history)
        right = [notebook[question(part)] == sum(part) for part in task['parts']]
        total = sum(sum(part) for part in task['parts'])
        right.append(None not in subtotals and notebook[question(subtotals)] == total)
        return sum(right)/len(right), dict(right=sum(right), compactions=self.compactions, retries=self.tries)

    async def find_out(self, numbers, notebook, history):
        "Ask in the long conversation and, at the same time, a helper who knows nothing of it; where they differ, a second helper decides."
        asked = question(numbers)
        mine, other = await asyncio.gather(self.solve(asked, history), self.solve(asked, []))
        if mine != other:
            third = await self.solve(asked, [])
            mine = other if third == other else mine
        notebook[asked] = mine

    async def solve(self, asked, history):
        "One question to its end. `history` grows by it. Returns a number, or None."
        history.append(Message('user', asked))
        for _ in range(self.max_steps):
            try:
                reply, results = await self.turn(history)
            except BadReply:
                history.append(Message('assistant', 'I do not know.'))
                return None
            history.append(reply)
            history.extend(results)
            if not results:
                return int(re.findall(r'-?\d+', reply.text)[-1])
        return None

    async def turn(self, history):
        "The next reply, with the tool's results. A malformed one is dropped and sampled again; BadReply when that does not help."
        for left in reversed(range(self.max_tries)):
            reply = await self.ask(history)
            try:
                return reply, self.read(reply)
            except BadReply:
                self.tries += 1
                if not left:
                    raise

    def read(self, reply):
        "Run the calls of a reply. BadReply where it is no call, and no number either."
        if not reply.calls and ('<tool_call>' in reply.text or not re.search(r'\d', reply.text)):
            raise BadReply('neither a call nor a number')
        return [Message('tool', add(call), answers=call.id) for call in reply.calls]

    def compact(self, history, notebook):
        "A history that has grown too long becomes the notebook and the last question with all that followed it."
        if sum(len(m.text) + sum(len(str(c.arguments)) for c in m.calls) for m in history) <= self.max_chars:
            return history
        self.compactions += 1
        facts = '; '.join(f'{asked} {answer}' for asked, answer in notebook.items() if answer is not None)
        last = max(i for i, m in enumerate(history) if m.role == 'user')
        return [Message('user', f'Known: {facts}'), *history[last:]]


# ---- the SDKs -----------------------------------------------------------------------------------

class OnOpenAI(Loop, ChatAgent):
    "With OpenAI's SDK, on Chat Completions."
    def connect(self, chat):
        return openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key)

    async def ask(self, history):
        tool = dict(type='function', function=dict(name='add', description='The sum of two numbers.', parameters=ADD))
        r = await self.client.chat.completions.create(model=self.model, messages=[self.wire(m) for m in history], tools=[tool])
        m = r.choices[0].message
        return Message('assistant', m.content or '', [Call(c.id, c.function.name, self.loads(c.function.arguments)) for c in m.tool_calls or ()])

    @staticmethod
    def loads(text):
        try:
            return json.loads(text)
        except ValueError:
            return text

    @staticmethod
    def wire(m):
        if m.role == 'tool':
            return dict(role='tool', tool_call_id=m.answers, content=m.text)
        calls = [dict(id=c.id, type='function', function=dict(name=c.name, arguments=json.dumps(c.arguments))) for c in m.calls]
        return dict(role=m.role, content=m.text, **dict(tool_calls=calls) if calls else {})


class OnAnthropic(Loop, ChatAgent):
    "With Anthropic's SDK, on Messages."
    def connect(self, chat):
        return anthropic.AsyncAnthropic(base_url=chat.base_url, api_key=chat.api_key)

    async def ask(self, history):
        tool = dict(name='add', description='The sum of two numbers.', input_schema=ADD)
        r = await self.client.messages.create(model=self.model, max_tokens=64, messages=[self.wire(m) for m in history], tools=[tool])
        text = ''.join(b.text for b in r.content if b.type == 'text')
        return Message('assistant', text, [Call(b.id, b.name, b.input) for b in r.content if b.type == 'tool_use'])

    @staticmethod
    def wire(m):
        if m.role == 'tool':
            return dict(role='user', content=[dict(type='tool_result', tool_use_id=m.answers, content=m.text)])
        text = [dict(type='text', text=m.text)] if m.text else []
        return dict(role=m.role, content=text + [dict(type='tool_use', id=c.id, name=c.name, input=c.arguments) for c in m.calls])
