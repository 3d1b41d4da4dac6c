"""The chat server under random trees of conversations, on six wires, under a fuzzer, and under clients that misbehave; one real engine behind it.

    python tests/test_chat_server.py 120        the fuzzer alone, for so many seconds (make prove)"""
import asyncio, contextlib, gc, json, logging, os, socket, subprocess, sys, tempfile, threading, time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
import httpx, numpy as np, psutil, pytest, ray
from hypothesis import given, settings, strategies as st
from molt_nb import chat_server
from molt_nb.agents import Limits
from molt_nb.chat_server import ChatConfig, ChatServer, Gate, Judge, Session
from molt_nb.engines import Engine, EngineConfig, Sampling, engine_env
from molt_nb.models import ADD, model_dir
from molt_nb.router import actor, chat_outputs, start_ray
from molt_nb.tokens import load_tokenizer

# ---------------------------------------------------------------- one engine, one server

class Stage:
    "An engine in a Ray actor, the server in this process, and sessions on both."
    def __init__(self):
        start_ray(1); config = EngineConfig(max_model_len=1024, max_num_seqs=128); path = model_dir('tiny-tools')
        self.engine = actor(Engine, engine_env(config), max_concurrency=1000).remote(path, config, Sampling())
        self.server = ChatServer(path, Sampling(), ChatConfig('hermes')); self.url = self.server.start()
        self.tokenizer = load_tokenizer(path); ray.get(self.engine.start.remote()); logging.getLogger('vllm').setLevel(logging.CRITICAL)     # a malformed call of the tiny model is no news

    def session(self, seed=0, cls=Session, outputs=None, **limits):
        s = cls(outputs or chat_outputs(self.engine)[0], chat_outputs(self.engine)[1], Limits(**dict(max_turns=1000, max_new_tokens=40, max_row_tokens=1000) | limits), seed)
        self.server.open(s); return s

    def close(self): self.server.close(); ray.shutdown()

@pytest.fixture(scope='module')
def stage():
    stage = Stage()
    try: yield stage
    finally: stage.close()

# ---------------------------------------------------------------- six wires, with nothing but httpx

WIRES = [(wire, stream) for wire in ('chat', 'responses', 'anthropic') for stream in (False, True)]
PATH = dict(chat='/chat/completions', responses='/responses', anthropic='/messages')
F = ADD['function']
TOOLS = dict(chat=[ADD], responses=[dict(type='function', **F)], anthropic=[dict(name='add', description=F['description'], input_schema=F['parameters'])])

def on_wire(wire, m):
    "The message or items for one neutral message: dict(role, text, calls=[(id, name, arguments)], of=id)."
    calls = m.get('calls', ())
    if wire == 'chat':
        if m['role'] == 'tool': return [dict(role='tool', tool_call_id=m['of'], content=m['text'])]
        return [dict(role=m['role'], content=m['text'], **dict(tool_calls=[dict(id=i, type='function', function=dict(name=n, arguments=json.dumps(a))) for i, n, a in calls]) if calls else {})]
    if wire == 'responses':
        if m['role'] == 'tool': return [dict(type='function_call_output', call_id=m['of'], output=m['text'])]
        text = [dict(role='assistant', type='message', id='m', status='completed', content=[dict(type='output_text', text=m['text'], annotations=[])]) if m['role'] == 'assistant' else dict(role=m['role'], content=m['text'])]
        return (text if m['text'] or not calls else []) + [dict(type='function_call', call_id=i, name=n, arguments=json.dumps(a)) for i, n, a in calls]
    if m['role'] == 'tool': return [dict(role='user', content=[dict(type='tool_result', tool_use_id=m['of'], content=m['text'])])]
    return [dict(role=m['role'], content=([dict(type='text', text=m['text'])] if m['text'] else []) + [dict(type='tool_use', id=i, name=n, input=a) for i, n, a in calls])]

def body(wire, stream, talk, tools=True, **more):
    items = [x for m in talk for x in on_wire(wire, m)]
    out = dict(model='policy', stream=stream, **{'input' if wire == 'responses' else 'messages': items}, **dict(tools=TOOLS[wire]) if tools else {}, **more)
    if wire == 'anthropic': out.setdefault('max_tokens', 4096)
    if wire == 'chat' and stream: out['stream_options'] = dict(include_usage=True)
    return out

def events(text): return [json.loads(line[6:]) for line in text.splitlines() if line.startswith('data: {')]

def heard(wire, stream, text):
    "The reply as a neutral message with `end` (the wire's reason) and `tokens`."
    if wire == 'chat':
        if not stream: r = json.loads(text); m = r['choices'][0]['message']; end, tokens = r['choices'][0]['finish_reason'], r['usage']['completion_tokens']; said, raw = m.get('content') or '', m.get('tool_calls') or []
        else:
            ev = events(text); parts = [c for e in ev for c in e['choices']]; said = ''.join(c['delta'].get('content') or '' for c in parts)
            raw = [c for part in parts for c in part['delta'].get('tool_calls') or ()]; end = next(c['finish_reason'] for c in reversed(parts)); tokens = ev[-1]['usage']['completion_tokens']
        calls = [(c['id'], c['function']['name'], json.loads(c['function']['arguments'])) for c in raw]
    elif wire == 'responses':
        r = json.loads(text) if not stream else next(e['response'] for e in events(text) if e['type'] == 'response.completed')
        said = ''.join(p['text'] for o in r['output'] if o['type'] == 'message' for p in o['content']); end, tokens = (r.get('incomplete_details') or {}).get('reason', r['status']), r['usage']['output_tokens']
        calls = [(o['call_id'], o['name'], json.loads(o['arguments'])) for o in r['output'] if o['type'] == 'function_call']
    else:
        if not stream: r = json.loads(text); blocks, end, tokens = r['content'], r['stop_reason'], r['usage']['output_tokens']
        else:
            blocks, ev = [], events(text)
            for e in ev:
                if e['type'] == 'content_block_start': blocks.append(dict(e['content_block'], json=''))
                if e['type'] == 'content_block_delta': blocks[-1]['json' if 'partial_json' in e['delta'] else 'text'] += e['delta'].get('partial_json', e['delta'].get('text', ''))
                if e['type'] == 'message_delta': end, tokens = e['delta']['stop_reason'], e['usage']['output_tokens']
        said = ''.join(b['text'] for b in blocks if b['type'] == 'text')
        calls = [(b['id'], b['name'], json.loads(b['json']) if b.get('json') else b['input']) for b in blocks if b['type'] == 'tool_use']
    return dict(role='assistant', text=said, calls=calls, end=end, tokens=tokens)

async def ask(client, url, s, wire, stream, talk, retry=0, tools=True, **more):
    r = await client.post(url + PATH[wire], json=body(wire, stream, talk, tools, **more), headers={'x-api-key': s.key, 'x-stainless-retry-count': str(retry)}, timeout=30)
    assert r.status_code == 200, r.text
    return heard(wire, stream, r.text)

def plain(reply): return reply['text'].strip(), [(n, a) for _, n, a in reply['calls']]

# ---------------------------------------------------------------- random trees

class Watched:
    "What the engine saw and sampled: `done` holds (prompt, sampled ids) of each request that came to its end."
    def __init__(self, engine): self.inner, self.done, self.started = chat_outputs(engine)[0], [], 0
    async def outputs(self, ids, params, request_id, free=False):
        seen, sampled = list(ids), []; self.started += 1
        async for out in self.inner(ids, params, request_id, free):
            sampled += out.outputs[0].token_ids
            if out.finished and out.outputs[0].finish_reason != 'abort': self.done.append((seen, sampled))
            yield out

def check_tree(s, watched):
    "Each sampled token is trained once, as it was sampled, behind the prompt that the engine saw; log-probs belong to it."
    trained = [(row.tokens[:x.start].tolist(), row.tokens[x.start:x.stop].tolist()) for row in s.tree.rows for x in row.spans if x.kind == 'action']
    assert sorted(trained) == sorted(watched.done)
    assert sum(int(row.action_mask.sum()) for row in s.tree.rows) == sum(len(ids) for _, ids in watched.done)
    assert all((row.logprobs[~row.action_mask] == 0).all() and (row.logprobs[row.action_mask] <= 0).all() and (row.versions[row.action_mask] == 0).all() for row in s.tree.rows)

MOVES = ['new', *['go on']*4, *['tool']*4, 'fork', 'edit', 'compact', 'again', 'retry', 'early retry', 'lost', 'twins']
move = st.tuples(st.sampled_from(MOVES), st.integers(0, 10**6), st.sampled_from(WIRES), st.booleans())

def next_talk(kind, n, talk):
    "The conversation to send, from one that ended with a reply."
    user = lambda text: dict(role='user', text=text)
    if kind == 'new' or not talk: return [user(f'What is {n % 9 + 1} + {n % 7 + 1} + 3?')]
    if kind == 'go on' or kind == 'tool' and not talk[-1]['calls']: return talk + [user(f'more {n % 3}')]
    if kind == 'tool': return talk + [dict(role='tool', of=i, text=str(n % 20)) for i, _, _ in talk[-1]['calls']]
    if kind == 'fork': cut = [k for k, m in enumerate(talk) if m['role'] == 'user']; return talk[:cut[n % len(cut)] + 1]
    if kind == 'edit': return talk[:-1] + [dict(role='assistant', text='changed', calls=[]), user('and?')]
    if kind == 'compact': return [user('Summary.'), talk[-1], *([dict(role='tool', of=i, text='7') for i, _, _ in talk[-1]['calls']]), user('next')]
    return talk[:-1]        # again, and all kinds of retry: the question that was asked last

async def play(stage, moves, remember=True):
    "Requests as `moves` say, those with a True flag together with the next. Returns the session, what the engine did, how many questions were asked, and how many of them stood on nothing sampled."
    watched = Watched(stage.engine); s = stage.session(outputs=watched.outputs, max_new_tokens=30); talks, asked, fresh, known, waiting = [], 0, 0, set(), []
    if not remember: s.hear = lambda new: None
    def key(talk): return tuple((m['role'], m['text'].strip() if m['role'] == 'assistant' else m['text'], json.dumps([c[1:] for c in m.get('calls', ())], sort_keys=True)) for m in talk)
    async with httpx.AsyncClient() as client:
        async def one(k, kind, n, wire, stream, talk):
            nonlocal asked, fresh
            asked += 1 + (kind == 'twins'); fresh += (1 + (kind == 'twins'))*(not any(key(talk[:i]) in known for i in range(len(talk))))
            mark = dict(metadata=dict(user_id=str(k))) if kind in ('retry', 'early retry', 'lost') else {}      # else another question with this body may be taken for the one that is repeated
            async def send(retry=0, after=0): await asyncio.sleep(after); return await ask(client, stage.url, s, wire, stream, talk, retry, **mark)
            if kind == 'lost':                      # the client goes away before the answer, and asks once more
                first = asyncio.ensure_future(send()); await asyncio.sleep(n % 40/1000); first.cancel(); await asyncio.gather(first, return_exceptions=True); reply = await send(1)
            elif kind == 'early retry': first, reply = await asyncio.gather(send(), send(1, .005 + n % 20/1000)); assert first['text'] == reply['text'] and plain(first) == plain(reply)     # while the first is in flight, or not
            elif kind == 'retry': first, reply = await send(), await send(2); assert plain(first) == plain(reply) == plain(await send(3)) and first['tokens'] == reply['tokens']         # the first retry was lost
            elif kind == 'twins': first, reply = await asyncio.gather(send(), send()); talks.append(talk + [first])
            else: reply = await send()
            talks.append(talk + [reply]); known.update(key(t) for t in talks)
        for k, (kind, n, (wire, stream), together) in enumerate(moves):
            waiting.append(one(k, kind, n, wire, stream, next_talk(kind, n, talks[n % len(talks)] if talks else [])))
            if not together: await asyncio.gather(*waiting); waiting = []
        await asyncio.gather(*waiting)
    await stage.server.shut(s); return s, watched, asked, fresh

TREES = Counter()
def random_trees(stage, examples, derandomize=True):
    @settings(max_examples=examples, deadline=None, derandomize=derandomize, database=None)
    @given(st.lists(move, min_size=6, max_size=16))
    def each(moves):
        s, watched, asked, fresh = asyncio.run(play(stage, moves)); check_tree(s, watched)
        assert s.tree.counts['turns'] == asked and s.tree.counts['first'] <= fresh, (s.tree.counts, asked, fresh)           # one turn for each question, however often it was sent; what was sampled is found again
        TREES.update(s.tree.counts, rollouts=1, rows=len(s.tree.rows), engine_requests=watched.started, fresh=fresh)
    each()

def test_random_trees(stage):
    "Interleaved conversations, forks, edits, compaction, repetition and retries, on all wires in one session: each sampled token is trainable once, behind the prompt that the engine saw."
    random_trees(stage, 40); print(dict(TREES))
    assert min(TREES[k] for k in ('continued', 'branched', 'first')) > 10 and not stage.server.gate.faults

def test_what_was_heard_changes_nothing(stage):
    "The same requests, one after the other, to a session that remembers what it heard and to one that reads everything each time: the engine sees and samples the same, and the trees are equal."
    met = Counter(); known = Session.known
    def noted(self, said): h = known(self, said); met[h is not None] += 1; return h
    kinds = st.sampled_from([m for m in MOVES if m not in ('twins', 'early retry', 'lost')])
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(kinds, st.integers(0, 10**6), st.sampled_from(WIRES[:2]*6 + WIRES), st.just(False)), min_size=10, max_size=20))
    def each(moves):
        (a, seen, *_), (b, read, *_) = (asyncio.run(play(stage, moves, n)) for n in (True, False))
        assert seen.done == read.done and a.tree.counts == b.tree.counts and [r.tokens.tolist() for r in a.tree.rows] == [r.tokens.tolist() for r in b.tree.rows]
    Session.known = noted
    try: each()
    finally: Session.known = known
    print(dict(met)); assert met[True] > 30 and not stage.server.gate.faults

def test_a_known_conversation(stage):
    "What goes on from a conversation that was heard: an error names the message as the client counts, other tools are other prompts, a number is no truth value, and half of what was heard is not enough."
    async def main():
        s = stage.session(); talk = [dict(role='system', text='Add.'), dict(role='user', text='What is 3 + 4 + 5?')]
        async with httpx.AsyncClient() as client:
            reply = await ask(client, stage.url, s, 'chat', False, talk); talk += [reply, dict(role='user', text='more')]
            sent = body('chat', False, talk)
            async def raw(**more): return await client.post(stage.url + PATH['chat'], json={**sent, **more}, headers={'x-api-key': s.key}, timeout=30)
            r = await raw(messages=sent['messages'] + [dict(role='user', content=7)]); assert r.status_code == 400 and 'messages.4.' in says_why('chat', r), r.text
            assert len(s.heard) == 1 and len(s.heard[0].said) == 2
            assert (await raw()).status_code == 200 and s.tree.counts == dict(turns=2, first=1, continued=1) and [len(h.said) for h in s.heard] == [2, 4]
            bare = {**sent, 'messages': sent['messages'] + [dict(role='assistant', content='x'), dict(role='user', content='y')]}; bare.pop('tools')
            assert (await client.post(stage.url + PATH['chat'], json=bare, headers={'x-api-key': s.key})).status_code == 200     # without tools: another prompt, from the start
            assert s.tree.counts == dict(turns=3, first=2, continued=1) and s.tree.rows[1].tokens[:40].tolist() != s.tree.rows[0].tokens[:40].tolist() and '<tools>' not in stage.tokenizer.decode(s.tree.rows[1].tokens)
            ones = [dict(role='user', content=[dict(type='text', text='hi', x=x)]) for x in (1, 1.0, True)]
            for m in ones: assert (await raw(messages=[m, dict(role='user', content='so?')])).status_code == 200 and s.known([chat_server.marshal.dumps(m, 2), b'', b'']) is None
            assert [s.known([chat_server.marshal.dumps(x, 2), chat_server.marshal.dumps(dict(role='user', content='so?'), 2), b'']) is not None for x in ones] == [True]*3
            part = dict(role='user', content=[dict(type='image_url', image_url=dict(url='data:image/png;base64,iVBORw0KGgo='), text='caption')]); turns = s.tree.counts['turns']
            for more in ([], [dict(role='assistant', content='ok'), dict(role='user', content='so?')]):           # refused, and its continuation is refused too
                r = await raw(messages=[part, *more]); assert r.status_code == 400 and 'multimodal' in says_why('chat', r), r.text
            deep = json.loads('{"a": ' * 600 + '1' + '}' * 600); call = dict(id='c', type='function', function=dict(name='add', arguments=json.dumps(deep)))
            r = await raw(messages=[dict(role='user', content='hi'), dict(role='assistant', tool_calls=[call]), dict(role='user', content='so?')]); assert r.status_code == 400 and 'deep' in says_why('chat', r), r.text
            for k in range(70): assert (await raw(messages=[dict(role='user', content='again')])).status_code == 200
            forks = [(await raw(messages=[dict(role='user', content='again'), dict(role='assistant', content=f'{k}'), dict(role='user', content='so?')])).status_code for k in range(3)]
            assert forks == [200]*3 and sum(len(h.said) == 1 and b'again' in h.said[0] for h in s.heard) == 1 and s.known([*next(h for h in s.heard if b'again' in h.said[0]).said, b'']) and s.tree.counts['turns'] == turns + 73
            done = [c for same in s.calls.values() for c in same]
            async with asyncio.timeout(10):
                while not all(c.body is None for c in done): await asyncio.sleep(.01)             # the last one is still being put away
            assert all(c.plan is c.body is c.said is c.known is c.request is None and all(o.prompt_token_ids is None for o in c.outs) for c in done) and len(done) > 80
        await stage.server.shut(s)
    asyncio.run(main()); assert not stage.server.gate.faults

def test_a_part_of_the_samples_is_no_answer(stage):
    "Two samples are asked for, one ends, the client goes away and asks again: two turns are trained, not three."
    said = Watched(stage.engine); slow = asyncio.Event()
    async def outputs(ids, params, request_id, free=False):
        if request_id.endswith('-1') and not slow.is_set(): await asyncio.sleep(60)
        async for out in said.outputs(ids, params, request_id, free): yield out
    async def main():
        for stream in (False, True):
            s = stage.session(outputs=outputs); slow.clear(); said.done.clear()
            async with httpx.AsyncClient() as client:
                def send(n): return asyncio.ensure_future(client.post(stage.url + PATH['chat'], json=body('chat', stream, [dict(role='user', text='What is 1 + 2 + 3?')], n=2), headers={'x-api-key': s.key, 'x-stainless-retry-count': str(n)}, timeout=30))
                first = send(0)
                while not said.done: await asyncio.sleep(.01)
                first.cancel(); await asyncio.gather(first, return_exceptions=True); slow.set()
                r = await send(1); assert r.status_code == 200 and s.tree.counts == dict(turns=2, first=2) and len(s.tree.rows) == 2, s.tree.counts
                again = await send(2); assert again.status_code == 200 and s.tree.counts['turns'] == 2
            await stage.server.shut(s)
    asyncio.run(main())

def test_a_role_is_no_text(stage):
    "A role that contains what looks like a text is another conversation."
    assert chat_server.prefix_keys([dict(role='user 7 x', content='abc')]) != chat_server.prefix_keys([dict(role='user', content='x 3 abc')])

# ---------------------------------------------------------------- six wires, equal rows

async def dialogue(client, stage, s, wire, stream, first, turns=4):
    "Ask, answer the calls, until there is none."
    talk, said = [dict(role='user', text=first)], []
    for k in range(turns):
        reply = await ask(client, stage.url, s, wire, stream, talk); talk.append(reply); said.append((reply['text'], plain(reply)[1], reply['tokens']))
        results = [dict(role='tool', of=i, text=str(sum(v for v in a.values() if isinstance(v, int)))) for i, _, a in reply['calls']]
        talk += results or [dict(role='user', text='And once more?')]
    await stage.server.shut(s); return said

def test_six_wires_give_equal_rows(stage):
    "The same dialogue, with whatever the model says: same texts, calls and usage, and the same row."
    async def main():
        seen = Counter()
        async with httpx.AsyncClient() as client:
            for seed in range(8):
                every = [(stage.session(seed), *w) for w in WIRES]
                said = await asyncio.gather(*(dialogue(client, stage, s, w, stream, f'What is {seed + 1} + 4 + 5?') for s, w, stream in every))
                assert all(x == said[0] for x in said), said
                assert all(s.tree.counts == dict(turns=4, first=1, continued=3) and len(s.tree.rows) == 1 for s, _, _ in every), [s.tree.counts for s, _, _ in every]
                rows = [s.tree.rows[0] for s, _, _ in every]            # six at once: log-probs may differ in their last bits, and what came from the prefix cache does
                assert all([(x.start, x.stop, x.kind, x.finish_reason) for x in r.spans] == [(x.start, x.stop, x.kind, x.finish_reason) for x in rows[0].spans] and r.tokens.tolist() == rows[0].tokens.tolist() and np.allclose(r.logprobs, rows[0].logprobs, atol=1e-5) for r in rows)
                seen.update(calls=sum(len(c) for _, c, _ in said[0]), texts=sum(bool(t) for t, _, _ in said[0]))
        return seen
    seen = asyncio.run(main()); print(dict(seen)); assert min(seen['calls'], seen['texts']) > 0

CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
ODD = ['', ' 12 ', 'a\n\nb', '<tool_call>7', '<tool_call></tool_call>', '</tool_call>', '<tool_call>\n{"name": "add"}\n</tool_call>', '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
       '<tool_call>\n{"name": "add", "arguments": {"a": 1', '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>', '<tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "add"}\n</tool_call>', 'so: ' + CALL % '{"a": 1, "b": 2}' + 'and', CALL % '{"a": 1}' + CALL % '{"a": 2}',
       *(CALL % x for x in ('15', '[1]', 'null', '"x"', '"{}"', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": 1, "a": 2}', '{"": {"b": [null, true, 1.5]}}', '{"a": "' + 'x'*300 + '"}'))]

def scripted(tokenizer, texts):
    "An engine that says `texts`, one a request, token by token where it streams."
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    texts = iter(texts)
    async def outputs(ids, params, request_id, free=False):
        sampled = tokenizer.encode(next(texts), add_special_tokens=False) + [tokenizer.eos_token_id]; one_by_one = params.output_kind.name == 'DELTA'
        for piece in [[k] for k in range(len(sampled))] if one_by_one else [range(len(sampled))]:
            last = piece[-1] == len(sampled) - 1; ids_now = [sampled[k] for k in piece]
            c = CompletionOutput(0, tokenizer.decode(ids_now[:-1] if last else ids_now), ids_now, 0.0, [{i: Logprob(-1.0)} for i in ids_now], finish_reason='stop' if last else None)
            if last: c.weight_versions = [SimpleNamespace(version='0', start=0, end=len(sampled))]
            yield RequestOutput(request_id, None, ids, None, [c], last, num_cached_tokens=0)
    return outputs

def test_malformed_calls(stage):
    "Whatever the model writes where a call should be: 200 on all wires, the same on all, and the next request goes on in the same row. A call that no wire can carry stays text."
    async def main():
        called = []
        async with httpx.AsyncClient() as client:
            for text in ODD:
                every = [(stage.session(outputs=scripted(stage.tokenizer, [text, '12'])), *w) for w in WIRES]
                said = await asyncio.gather(*(dialogue(client, stage, s, w, stream, 'hi', 2) for s, w, stream in every))
                assert all([plain(dict(text=t, calls=[(0, *c) for c in cs])) for t, cs, _ in x] == [plain(dict(text=t, calls=[(0, *c) for c in cs])) for t, cs, _ in said[0]] for x in said), (text, said)
                assert all(s.tree.rows == every[0][0].tree.rows and s.tree.counts == dict(turns=2, first=1, continued=1) for s, _, _ in every), (text, [s.tree.counts for s, _, _ in every])
                called.append(said[0][0][1]); assert called[-1] or said[0][0][0].strip() == text.strip(), (text, said[0])      # nothing of it is lost
        return called
    called = asyncio.run(main()); assert sum(map(bool, called)) == 7 and not stage.server.gate.faults, called

# ---------------------------------------------------------------- a session is alone, and ends

def test_no_session_reads_another(stage):
    "The same history, the same body and a retry of it under another key: nothing of the first session is found. A key is good for as long as its session."
    async def main():
        a, b = stage.session(1), stage.session(2); talk = [dict(role='user', text='What is 3 + 4 + 5?')]
        async with httpx.AsyncClient() as client:
            said = await ask(client, stage.url, a, 'chat', False, talk); talk += [said, dict(role='user', text='more')]
            await ask(client, stage.url, b, 'chat', False, talk, retry=1); await ask(client, stage.url, b, 'chat', False, talk[:1], retry=1)
            assert a.tree.counts == dict(turns=1, first=1) and b.tree.counts == dict(turns=2, first=2)
            tries = [dict(authorization=f'Bearer {b.key}', **{'x-api-key': ''}), {'x-api-key': a.key[:-1]}, {'authorization': a.key[::-1]}, {}]
            codes = [(await client.get(stage.url + '/models', headers=h)).status_code for h in tries]; assert codes == [200, 401, 401, 401], codes
            await stage.server.shut(a)
            r = await client.post(stage.url + PATH['chat'], json=body('chat', False, talk), headers={'x-api-key': a.key}); assert r.status_code == 401
            assert (await client.get(stage.url + '/models', headers={'x-api-key': b.key})).status_code == 200
        await stage.server.shut(b)
    asyncio.run(main())

def test_the_end_of_a_session(stage):
    "Requests in flight are answered with an error when the rollout ends, on every wire, and what they would have sampled is not recorded; a request that is still on its way finds no session."
    async def main():
        held = asyncio.Event()
        async def never(ids, params, request_id, free=False):
            held.set(); await asyncio.sleep(600); yield
        async with httpx.AsyncClient() as client:
            for wire, stream in WIRES:
                s = stage.session(outputs=never); held.clear()
                asked = asyncio.ensure_future(client.post(stage.url + PATH[wire], json=body(wire, stream, [dict(role='user', text='hi')]), headers={'x-api-key': s.key}, timeout=20))
                while not s.active: await asyncio.sleep(.005)
                await asyncio.wait_for(stage.server.shut(s), 5)
                try: r = await asyncio.wait_for(asked, 5); assert r.status_code == 500 or stream and 'error' in r.text, (wire, stream, r.status_code, r.text)
                except httpx.RemoteProtocolError: assert stream                         # the stream breaks off
                assert not s.tree.rows and not s.active
    asyncio.run(main()); assert not stage.server.gate.faults

def test_no_room_ends_with_length_on_every_wire(stage):
    "A turn that does not fit says so, also in a stream."
    async def main():
        async with httpx.AsyncClient() as client:
            for wire, stream in WIRES:
                s = stage.session(max_row_tokens=30); reply = await ask(client, stage.url, s, wire, stream, [dict(role='user', text='What is 3 + 4 + 5? '*9)])
                assert (reply['end'], reply['text'], reply['tokens']) == (dict(chat='length', responses='max_output_tokens', anthropic='max_tokens')[wire], '', 0) and 'max_row_tokens=30' in s.truncated, (wire, stream, reply)
                await stage.server.shut(s)
    asyncio.run(main())

# ---------------------------------------------------------------- clients that misbehave

def says_why(wire, r):
    "The message of an error in the envelope of its wire."
    e = r.json(); assert 'error' in e, e
    if wire == 'anthropic': assert e['type'] == 'error' and isinstance(e['error']['type'], str), e
    return e['error']['message']

def post(stage, s, wire, data, **headers): return httpx.post(stage.url + PATH.get(wire, wire), content=data, headers={'x-api-key': s.key, 'content-type': 'application/json'} | headers, timeout=20)

def alive(stage):
    "The server answers a stranger, and a new session is served."
    s = stage.session()
    async def one():
        async with httpx.AsyncClient() as client: return await ask(client, stage.url, s, 'chat', False, [dict(role='user', text='What is 1 + 2 + 3?')])
    reply = asyncio.run(one()); assert reply['tokens'] > 0; asyncio.run(stage.server.shut(s))

def bad_bodies(wire):
    "name: (what is wrong, the status that it deserves)"
    name = 'input' if wire == 'responses' else 'messages'; ok = body(wire, False, [dict(role='user', text='hi')]); nest = lambda n: f'{{"model": "policy", "max_tokens": 5, "{name}": {"[" * n}{"]" * n}}}'.encode()
    with_ = lambda **kw: json.dumps({**ok, **kw}).encode()
    deep = lambda n: json.dumps(ok)[:-1].encode() + b', "metadata": ' + b'{"a": ' * n + b'1' + b'}' * n + b'}'
    return {'5 MiB': (with_(**{name: [dict(role='user', content='x' * (5 << 20))]}), 413), '3,000 messages': (with_(**{name: [dict(role='user', content='x')] * 3000}), 413), 'invalid UTF-8': (b'{"model": "policy", "' + name.encode() + b'": "\xff\xfe"}', 400),
            **{f'nested {n} deep': (nest(n), 400) for n in (90, 400, 900, 990, 5000, 100_000)}, **{f'metadata {n} deep': (deep(n), {200, 400}) for n in (400, *range(900, 1000, 4))}, **{f'metadata {n} deep': (deep(n), 400) for n in (5000, 100_000)},
            **{f'the body {b!r}': (b, 400) for b in (b'', b'null', b'[]', b'1', b'"x"', b'{', b'{}', b'NaN', b'\x00', b'{"a": 1')},
            'no messages': (with_(**{name: []}), 400), 'messages that are none': (with_(**{name: [1, None, 'x']}), 400), 'a message without a role': (with_(**{name: [dict(content='hi')]}), 400), 'an unknown role': (with_(**{name: [dict(role='king', content='hi')]}), {200, 400}),
            'a picture': (with_(**{name: [dict(role='user', content=[dict(type='input_image' if wire == 'responses' else 'image', image_url='data:image/png;base64,AAAA', source=dict(type='base64', media_type='image/png', data='AAAA'))])]}), 400),
            'half a surrogate': (with_(**{name: [dict(role='user', content='\ud83d')]}), 400), 'tools that are none': (with_(tools=[1]), 400), 'a tool without a name': (with_(tools=[{}]), 400), 'a stream that is none': (with_(stream='perhaps'), 400),
            'max_tokens NaN': (json.dumps(ok)[:-1].encode() + b', "max_tokens": NaN, "max_output_tokens": NaN}', 400), 'max_tokens -1': (with_(max_tokens=-1, max_output_tokens=-1), 400)}

@pytest.mark.parametrize('wire', PATH)
def test_bad_requests(stage, wire):
    "Each gets a 4xx in its wire's envelope, with words; nothing is sampled, nothing is recorded, and no fault of ours is noted."
    s, found = stage.session(), {}
    for what, (data, status) in bad_bodies(wire).items():
        r = post(stage, s, wire, data); found[what] = (r.status_code, says_why(wire, r) if r.status_code >= 400 else r.text)
        assert r.status_code in (status if isinstance(status, set) else {status}) and len(found[what][1]) > 5, (what, found[what])
    for method in ('GET', 'HEAD', 'OPTIONS', 'PUT', 'PATCH', 'DELETE', 'TRACE'):
        r = httpx.request(method, stage.url + PATH[wire], headers={'x-api-key': s.key}); assert r.status_code == 405 and (method == 'HEAD' or method in says_why(wire, r)), (method, r.status_code)
    good = json.dumps(body(wire, False, [dict(role='user', text='hi')])).encode()
    for r in (post(stage, s, wire, good, **{'content-type': 'text/plain'}), httpx.post(stage.url + PATH[wire], content=good, headers={'x-api-key': s.key})): assert r.status_code in (400, 415) and says_why(wire, r), r.text
    assert s.tree.counts['turns'] == sum(code == 200 for code, _ in found.values()); alive(stage)
    assert not stage.server.gate.faults, stage.server.gate.faults[-1]; asyncio.run(stage.server.shut(s))

def test_what_the_engine_does_not_take(stage):
    "A request that would fail in the engine, or does, is the client's fault: a 400, or an error in the stream; the session goes on, for the policy and for a judge."
    for cls in (Session, Judge):
        s = stage.session(cls=cls)
        for wire, stream in WIRES[:2] + WIRES[4:]:
            ask1 = body(wire, stream, [dict(role='user', text='hi')]); field = 'stop_sequences' if wire == 'anthropic' else 'stop'
            r = post(stage, s, wire, json.dumps({**ask1, field: ['\ud83d']}).encode()); assert r.status_code == 400 and 'half a surrogate' in says_why(wire, r), (wire, stream, r.text)
            if cls is Judge and wire == 'chat':       # its fields are free, and the engine refuses a word that is none
                r = post(stage, s, wire, json.dumps({**ask1, 'logit_bias': {'99999': 1}}).encode()); assert r.status_code == (200 if stream else 400) and 'does not take' in r.text and '99999' in r.text, (stream, r.text)
            assert not s.gone.done() and not s.active and post(stage, s, wire, json.dumps({**ask1, field: ['\n\n']}).encode()).status_code == 200
        assert s.tree.counts['turns'] == (4 if cls is Session else 0); asyncio.run(stage.server.shut(s))
    assert not stage.server.gate.faults

def test_odd_but_good_requests(stage):
    "What is unusual and harmless is served, and what is overruled is said in a header that no client can break."
    s = stage.session(); hi, hi_items = [dict(role='user', text='hi')], [dict(role='user', content='hi')]; told = {'a\r\nx-evil: 1': 1, 'ü\x00': 2, 'temperature': float('nan'), 'logit_bias': {'1': -100}, 'seed': 10**40, 'tool_choice': dict(type='function', function=dict(name='add'))}
    r = post(stage, s, 'chat', json.dumps({**body('chat', False, hi), **told}).encode()); note = r.headers['x-molt-nb-note']
    assert r.status_code == 200 and 'x-evil' not in r.headers and all(x in note for x in ('temperature', 'logit_bias', 'seed', 'tool_choice'))
    r = httpx.post(stage.url + PATH['chat'], content=(bytes([c]) for c in json.dumps(body('chat', False, hi)).encode()), headers={'x-api-key': s.key, 'content-type': 'application/json'}); assert r.status_code == 200       # in chunks of one byte
    for path in ('/chat/completions', '/v1/chat/completions', '/v1/chat/completions/', '/chat/completions?x=1'): assert post(stage, s, path, json.dumps(body('chat', False, hi)).encode()).status_code == 200, path
    for path in ('/embeddings', '/chat', '/../v1/models/x', '/chat/completions/batch', '/responses/abc', '/%00'): assert post(stage, s, path, b'{}').status_code == 404, path
    for parts in ([], ['a'], ['a', 'b', 'c']):       # all that an assistant said, in however many parts
        item = dict(type='message', role='assistant', id='m', status='completed', content=[dict(type='output_text', text=p, annotations=[]) for p in parts]); t = stage.session()
        assert post(stage, t, 'responses', json.dumps({**body('responses', False, hi), 'input': [*hi_items, item, dict(role='user', content='so?')]}).encode()).status_code == 200
        told = stage.tokenizer.decode(t.tree.rows[0].tokens.tolist()); assert f"<|im_start|>assistant\n{''.join(parts)}<|im_end|>" in told, told
        asyncio.run(stage.server.shut(t))
    two = scripted(stage.tokenizer, [CALL % '{"a": 1}' + CALL % '{"a": 2}']*4)
    for stream in (False, True):                     # one call at a time, if the client wishes
        for wire, wish in (('chat', dict(parallel_tool_calls=False)), ('anthropic', dict(tool_choice=dict(type='auto', disable_parallel_tool_use=True)))):
            t = stage.session(outputs=two); ref = httpx.post(stage.url + PATH[wire], json=body(wire, stream, hi, **wish), headers={'x-api-key': t.key}); assert [a for _, _, a in heard(wire, stream, ref.text)['calls']] == [dict(a=1)], (wire, stream)
            asyncio.run(stage.server.shut(t))
    assert not stage.server.gate.faults; asyncio.run(stage.server.shut(s))

def raw(stage, s, *pieces, pause=0, read=True, wire='chat', length=None):
    "Send bytes over a bare socket; returns what came back."
    host, port = stage.url.split('//')[1].split('/')[0].split(':')
    with socket.create_connection((host, int(port)), timeout=20) as c:
        c.sendall(f'POST /v1{PATH[wire]} HTTP/1.1\r\nHost: x\r\nx-api-key: {s.key}\r\nContent-Type: application/json\r\nContent-Length: {length or sum(map(len, pieces))}\r\n\r\n'.encode())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for p in pieces: c.sendall(p); time.sleep(pause)
        if not read: return b''
        out = b''
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while chunk := c.recv(1 << 16):
                out += chunk
                if b'\r\n\r\n' in out and len(out.split(b'\r\n\r\n', 1)[1]) >= int(out.lower().split(b'content-length: ')[1].split(b'\r\n')[0]): break
        return out

def test_slow_and_broken_clients(stage, monkeypatch):
    "A body that comes byte by byte ends with 408 when its time is over; half a body and no more, a reset in the middle of a reply, and a reply that nobody reads cost nothing."
    monkeypatch.setattr(chat_server._read, '__defaults__', (1.0,))
    s = stage.session(max_new_tokens=400); data = json.dumps(body('chat', False, [dict(role='user', text='hi')])).encode()
    t = time.time(); out = raw(stage, s, *(bytes([c]) for c in data[:40]), pause=.1, length=len(data)); assert out.startswith(b'HTTP/1.1 408') and b'within 1' in out and time.time() - t < 8, out[:300]
    for _ in range(20): raw(stage, s, data[:len(data)//2], read=False, length=len(data))
    for _ in range(20): raw(stage, s, data, read=False)                                     # the whole request, and gone
    open_ = [socket.create_connection(('127.0.0.1', int(stage.url.split(':')[2].split('/')[0]))) for _ in range(50)]      # and some that never say a word
    end = time.time() + 10
    while s.active and time.time() < end: time.sleep(.05)
    assert not s.active; alive(stage)
    for c in open_: c.close()
    assert not stage.server.gate.faults, stage.server.gate.faults[-1]; asyncio.run(stage.server.shut(s))

# ---------------------------------------------------------------- many at once

def test_64_sessions_at_once(stage):
    "All are answered. Prints the server's CPU time a turn."
    async def main(n=64):
        sessions = [stage.session(k) for k in range(n)]; clock = time.pthread_getcpuclockid(stage.server.thread.ident)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
            async def one(k): return await dialogue(client, stage, sessions[k], *WIRES[k % 6], f'What is {k % 9 + 1} + {k % 5 + 1} + 2?')
            t, cpu, mine = time.time(), time.clock_gettime(clock), time.process_time(); said = await asyncio.gather(*map(one, range(n)))
            turns = sum(map(len, said)); return turns, time.time() - t, (time.clock_gettime(clock) - cpu)/turns, (time.process_time() - mine)/turns, sessions
    turns, seconds, server, process, sessions = asyncio.run(main())
    print(f'{len(sessions)} sessions, {turns} turns in {seconds:.1f} s: {1e3*server:.1f} CPU ms a turn in the server thread, {1e3*process:.1f} in the whole process, clients included')
    assert turns == 4*64 and all(s.tree.counts['turns'] == 4 for s in sessions) and not stage.server.gate.faults

# ---------------------------------------------------------------- a fuzzer

def uss(): gc.collect(); return psutil.Process().memory_full_info().uss/2**20

def words(schema):
    "Properties of each path's request, and every string that the schema names."
    named = set()
    def walk(x):
        if isinstance(x, dict):
            named.update(v for v in [x.get('const'), *(x.get('enum') or [])] if isinstance(v, str)); [walk(v) for v in x.values()]
        elif isinstance(x, list): [walk(v) for v in x]
    walk(schema); fields = {}
    for wire in PATH:
        ref = schema['paths'][f'/v1{PATH[wire]}']['post']['requestBody']['content']['application/json']['schema']['$ref'].split('/')[-1]; fields[wire] = sorted(schema['components']['schemas'][ref]['properties'])
    return fields, sorted(named)

def mutants(rng, fields, named):
    "Requests that are almost right: some part of a good one is left out, doubled, or something else."
    odd = lambda: rng.choice([None, True, 0, 1, -1, 3, 2**63, 10**30, .5, 1e308, float('nan'), '', 'x', 'auto', '\ud83d', '\x00', 'x'*3000, [], [None], [1], ['x'], {}, dict(type='x'), dict(type=rng.choice(named)), [dict(type=rng.choice(named))], dict(name='x'), dict(a=dict(b=[{}])), rng.choice(named), [rng.choice(named)]])
    def spoil(x):
        if isinstance(x, dict) and x:
            k = rng.choice(list(x)); act = rng.random()
            if act < .5 and isinstance(x[k], (dict, list)): spoil(x[k])
            elif act < .6: del x[k]
            elif act < .7: x[rng.choice(['type', 'content', 'id', 'name', 'role', 'tool_calls', 'input', 'text', 'arguments', 'function'])] = odd()
            else: x[k] = odd()
        elif isinstance(x, list) and x:
            k = rng.randrange(len(x)); act = rng.random()
            if act < .6 and isinstance(x[k], (dict, list)): spoil(x[k])
            elif act < .8: x.insert(k, x[k])
            else: x[k] = odd()
    while True:
        wire, stream = rng.choice(WIRES); call = [('c1', 'add', dict(a=1, b=2))]
        talk = [dict(role='system', text='Be good.'), dict(role='user', text='hi'), dict(role='assistant', text='', calls=call), dict(role='tool', of='c1', text='3'), dict(role='assistant', text='so'), dict(role='user', text='more')][:rng.choice([1, 2, 4, 6])]
        made = json.loads(json.dumps(body(wire, stream, talk, rng.random() < .7)))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            if rng.random() < .5: spoil(made)
            else: made[rng.choice(fields[wire])] = odd()
        yield rng.choice([PATH[wire], PATH[wire], '/messages/count_tokens']) if wire == 'anthropic' else PATH[wire], json.dumps(made).encode()

async def mutate(stage, schema, key, until, seed, slow):
    "Send mutants until then, four at a time. Nothing may take longer than ten seconds."
    import random
    stream = mutants(random.Random(seed), *words(schema))
    async with httpx.AsyncClient(timeout=20) as client:
        async def one():
            while time.time() < until:
                path, data = next(stream); t = time.time()
                await client.post(stage.url + path, content=data, headers={'x-api-key': key, 'content-type': 'application/json'}); await client.get(stage.url + '/models', headers={'x-api-key': key})
                if time.time() - t > 10: slow.append(data)
        await asyncio.gather(*(one() for _ in range(4)))

def fuzz(stage, seconds, seed=0):
    "schemathesis and mutants against the five paths, with a valid key, for so many seconds. Returns (schemathesis' words, statuses by path, MiB by time, requests that took long)."
    statuses, memory, slow, key, whole = Counter(), [], [], 'fuzz', Gate.__call__
    async def counted(gate, scope, receive, send):
        async def tell(m):
            if m['type'] == 'http.response.start': statuses[scope['path'], int(m['status'])] += 1
            await send(m)
        await whole(gate, scope, receive, tell)
    def fresh():
        "The same key for a new rollout: a session keeps all its turns, and lives for one rollout."
        s = stage.session(max_turns=50, max_new_tokens=4); del stage.server.gate.sessions[s.key]; s.key = key; stage.server.open(s)
    Gate.__call__ = counted; fresh()
    try:
        with tempfile.TemporaryDirectory() as d:
            schema = Path(d)/'openapi.json'; schema.write_text(json.dumps(api := stage.server.wires.app.openapi()))
            cmd = [sys.executable, '-c', 'import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())', 'run', str(schema), '--url', stage.url.removesuffix('/v1'), '-H', f'x-api-key: {key}', '--max-time', str(seconds), '-c', 'not_a_server_error',
                   '--continue-on-failure', '--phases', 'fuzzing' if seconds < 60 else 'coverage,fuzzing', '--request-timeout', '20', '--workers', '2', '--no-shrink', *(x for p in chat_server.PATHS for x in ('--include-path', p))]
            log = open(f'{d}/log', 'w+'); p = subprocess.Popen(cmd, cwd=d, stdout=log, stderr=log); t = time.time()
            async def both():
                other = asyncio.ensure_future(mutate(stage, api, key, t + seconds, seed, slow))
                while (p.poll() is None or not other.done()) and time.time() - t < seconds + 60: await asyncio.sleep(.5); fresh(); memory.append((time.time() - t, uss()))
                await other
            try: asyncio.run(both())
            finally:
                if p.poll() is None: p.kill()
                p.wait()
            return Path(log.name).read_text(), statuses, memory, slow
    finally: Gate.__call__ = whole; del stage.server.gate.sessions[key]

def judge_fuzz(stage, seconds, seed=0):
    out, statuses, memory, slow = fuzz(stage, seconds, seed); late = [m for t, m in memory if t > .4*memory[-1][0]]
    print(f'{sum(statuses.values())} requests in {memory[-1][0]:.0f} s:', dict(Counter(c for (_, c), n in statuses.items() for _ in range(n))), f'memory {late[0]:.0f} -> {late[-1]:.0f} MiB (after warm-up)')
    faults = list(stage.server.gate.faults); assert 'Test cases' in out and 'Server error' not in out and not faults and not slow and not [k for k in statuses if k[1] >= 500], (out[-6000:], faults[-1:], statuses)
    ok = {p for (p, c) in statuses if c == 200}; assert {f'/v1{x}' for x in ('/chat/completions', '/models', '/messages', '/messages/count_tokens', '/responses')} <= ok, statuses
    assert max(late) - late[0] < 48, late
    assert not any(s.active for s, _ in stage.server.gate.sessions.values()); alive(stage)

def test_fuzz(stage): judge_fuzz(stage, 10)

if __name__ == '__main__':
    stage = Stage()
    try: random_trees(stage, 60, derandomize=False); judge_fuzz(stage, int(sys.argv[1]), int(time.time())); print('1 passed')
    finally: stage.close()
