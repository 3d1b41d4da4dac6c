"""Agents with their own SDKs and frameworks, trained through the loop: two frameworks, an agent that compacts its history, one that asks a judge, and agents that misbehave; in the middle the engine dies."""
import asyncio, importlib, inspect, itertools, os, signal, sys
from collections import Counter
import anthropic, openai, pytest
from molt_nb.agents import ChatAgent
from molt_nb.async_loop import AsyncLoop
from molt_nb.models import ADD
from molt_nb.recipes import load_recipe
from procs import ROOT

GOOD = ['openai_adder.py', 'anthropic_adder.py', 'openai_agents_sdk.py:Adder', 'openai_agents_sdk.py:AdderOnResponses', 'pydantic_ai_agent.py', 'compacting.py:OnOpenAI', 'compacting.py:OnAnthropic']
FAULTS = dict(raises='error', hangs='error', leaves='error', nothing='invalid')
SUM, ASKED = 'What is 9 + 9 + 9?', 'Judge this: 12'

def agent_of(name):
    "The class; imported, because several rollouts of a process may ask for it at once."
    if f'{ROOT}/agents' not in sys.path: sys.path.append(f'{ROOT}/agents')
    file, _, cls = name.partition('.py'); return getattr(importlib.import_module(file), cls.removeprefix(':') or 'Adder')

async def judged(adder, chat, task):
    "The adder's reward, and what the judge says: twice with temperature 0, twice as it likes."
    reward, info = await adder.run(chat, task); j = chat.judge
    async with openai.AsyncOpenAI(base_url=j.base_url, api_key=j.api_key) as client, anthropic.AsyncAnthropic(base_url=j.base_url, api_key=j.api_key) as other:
        async def ask(text, **kw): m = (await client.chat.completions.create(model=j.model, messages=[dict(role='user', content=text)], tools=[ADD], **kw)).choices[0].message; return f'{m.content} {[c.function.arguments for c in m.tool_calls or ()]}'
        cold = [await ask(SUM, temperature=0) for _ in range(2)]
        block = (await other.messages.create(model=j.model, max_tokens=40, messages=[dict(role='user', content=ASKED)], extra_body=dict(temperature=0))).content[0].text
        return reward, dict(info, cold=cold, block=block, warm=[await ask(ASKED, temperature=1) for _ in range(2)])

class Every(ChatAgent):
    "Each task names its agent. A task with a fault misbehaves once, in its first rollout."
    seen = {}
    @classmethod
    def tasks(cls, n, seed):
        one = lambda name, of, **more: dict(agent_of(name).tasks(1, f'{seed}/{of}')[0], id=f'{of}-{seed}', of=of, agent=name, **more)
        return [one(name, name) for name in GOOD] + [one('openai_adder.py', 'judged')] + [one('openai_adder.py', f, fault=f) for f in FAULTS]
    async def run(self, chat, task):
        agent, first = agent_of(task['agent'])(), next(self.seen.setdefault(task['id'], itertools.count())) == 0      # rollouts run in threads
        if task['of'] == 'judged': return await judged(agent, chat, task)
        result = agent.run(chat, task); result = await result if inspect.isawaitable(result) else result
        if not first or 'fault' not in task: return result
        if task['fault'] == 'raises': raise RuntimeError('the agent broke')
        if task['fault'] == 'leaves': raise SystemExit(3)
        if task['fault'] == 'hangs': await asyncio.sleep(600)


@pytest.mark.parametrize('name', GOOD)
def test_an_agent_is_trained_by_naming_its_file(name):
    "The recipe takes it as it is."
    assert load_recipe('tiny-tools', f'task.agent=agents/{name}').task.agent.endswith(name)

def test_they_all_train(tmp_path):
    "Five steps of one group of each, strictly in turn, so that every log-prob can be compared; in the last but one the engine is killed."
    seen, batches = {}, []
    async def main():
        run = AsyncLoop(load_recipe('tiny-tools', ['chat.judge=tiny-tools', 'limits.max_turns=60', 'limits.max_row_tokens=512', 'limits.episode_timeout_s=25', 'engine.max_model_len=512', 'engine.request_timeout_s=20', 'pool.samples_per_group=4', 'pool.groups_per_batch=12',
                                                   'pool.groups_in_flight=12', 'pool.synchronous=true', 'pool.filter_no_spread=false', f'out_dir={tmp_path}/run', 'show_rollouts=1'], steps=5), agent=Every)
        async def once(more=''):
            rollout, next_batch = run.pool.rollout, run.pool.next_batch
            async def noted(task, *a): t = await rollout(task, *a); seen.setdefault(task['of'], []).append(t); return t
            async def taken(*a): groups = await next_batch(*a); batches.append([t for g in groups for t in g.trajectories]); return groups
            run.pool.rollout, run.pool.next_batch = noted, taken
        try:
            print(await run.start()); await once()
            for _ in range(3): await run.step()
            going, engine = asyncio.ensure_future(run.step()), run.engines.handles['engine0']
            while not (status := await asyncio.wrap_future(engine.status.remote().future()))['live']: await asyncio.sleep(.02)
            os.kill(status['pid'], signal.SIGKILL); await going
            await run.step(); return run.history, dict(run.engines.restarts), run.pool.ledger(), run.tokenizer
        finally: await run.close()
    history, restarts, ledger, tokenizer = asyncio.run(main())
    print([f"{h['time/step']:.0f} s, {h['batch/rows']} rows, mismatch {h['mismatch/abs_log_max']:.0e}" for h in history], {k: Counter(t.outcome for t in ts) for k, ts in seen.items()}, {t.reason for ts in seen.values() for t in ts if t.outcome in ('error', 'invalid')}, sep='\n')

    # the recorded ids and log-probs are the engine's, under every agent
    assert all(h['mismatch/abs_log_max'] <= 1e-4 and h['sync/mismatch'] <= 1e-4 and h['staleness/max'] == 0 for h in history) and len(history) == 5
    for h, batch in zip(history, batches):
        assert {t.task_id.rsplit('-', 1)[0] for t in batch} == {*GOOD, 'judged', *FAULTS}                                       # each agent in each of the steps
        assert h['batch/rows'] == sum(len(t.segments) for t in batch) and h['batch/trainable_tokens'] == sum(t.n_actions for t in batch)
    for t in sum(seen.values(), []):
        spans = [(id(s), x.start) for s in t.segments for x in s.spans if x.kind == 'action']
        assert len(spans) == t.info['turns'] == sum(t.info.get(k, 0) for k in ('first', 'continued', 'branched', 'rewritten')), t.info           # a turn, a span
    # frameworks and compaction: no error, and what the agents did is seen
    for name in GOOD: assert {t.outcome for t in seen[name]} <= {'ok', 'truncated'} and len(seen[name]) == 20, (name, [t.reason for t in seen[name]])
    for name in GOOD[:5]: assert all(len(t.segments) == 1 for t in seen[name] if t.info['turns'] == t.info.get('continued', 0) + 1) and max(t.info['turns'] for t in seen[name]) >= 3
    for name in GOOD[5:]: assert all(len(t.segments) > 4 for t in seen[name]) and sum(t.info['compactions'] for t in seen[name]) > 0 and sum(t.info['retries'] for t in seen[name]) > 0, name
    # the judge: temperature 0 is its client's to choose, it never learns, and nothing of it is in a row
    assert len({text for t in seen['judged'] for text in t.info['cold']}) == len({t.info['block'] for t in seen['judged']}) == 1 and len({text for t in seen['judged'] for text in t.info['warm']}) > 1
    rows = [tokenizer.decode(s.tokens) for t in seen['judged'] for s in t.segments]; assert rows and not [r for r in rows if ASKED in r or SUM in r]
    # a fault costs one rollout, the engine's death none
    for fault, outcome in FAULTS.items(): assert Counter(t.outcome not in ('ok', 'truncated') for t in seen[fault]) == {True: 1, False: 19} and next(t for t in seen[fault] if t.outcome == outcome).reason, (fault, Counter(t.reason for t in seen[fault]))
    assert sum(h['rollouts/error'] for h in history) == 3 and sum(h['rollouts/invalid'] for h in history) == 1
    assert restarts == {'engine0': 1} and history[3]['rollouts/rerun'] > 0 and ledger['started'] == sum(v for k, v in ledger.items() if k != 'started') and ledger['dropped'] == 0
