"""Old tokens on the real stack: what is too old is not trained, no task is lost, and each token of a rollout that crosses syncs belongs to its own version."""
import asyncio, json, sys, time
import numpy as np, pytest, ray, torch
from molt_nb.agents import Env
from molt_nb.async_loop import AsyncLoop
from molt_nb.batches import make_batch
from molt_nb.engines import Engine, EngineConfig, Sampling, engine_env
from molt_nb.inspector import save_trace
from molt_nb.models import random_tiny
from molt_nb.policy import Policy, PolicyConfig, policy_env
from molt_nb.recipes import load_recipe
from molt_nb.router import actor, start_ray
from molt_nb.tokens import Segment, Trajectory
from molt_nb.weight_sync import WeightSync

SMALL = 'pool.groups_per_batch=4 pool.samples_per_group=4 pool.groups_in_flight=10 pool.queue_groups=4 pool.max_staleness=1 '

class Slow(Env):
    "Arithmetic whose grader takes as long as several training steps for one task in six; any answer gets its length as reward."
    @classmethod
    def tasks(cls, n, seed): return [dict(id=f'{"slow" if i % 6 == 0 else "fast"}{i}', a=i) for i in range(n)]
    async def reset(self, task): self.task, self.turns = task, 0; return [dict(role='user', content=f'What is {task["a"]} + 1?')]
    async def step(self, action):
        self.turns += 1
        if self.task['id'].startswith('slow'): await asyncio.sleep(.8)
        return [dict(role='user', content='Again.')], float(len(action.ids) % 3), self.turns == 4, False, {}

async def live(run): return [(await asyncio.wrap_future(h.status.remote().future()))['live'] for h in run.engines.handles.values()]

def whole(run):
    "Group ledger and task ledger balance, whatever the state of the run."
    run.pool.check(); ledger = run.pool.ledger(); fates = run.pool.by_task()
    assert ledger['started'] == sum(v for k, v in ledger.items() if k != 'started') and sum(f.total() for f in fates.values()) == sum(run.pool.drawn.values())
    return ledger, fates

@pytest.mark.parametrize('too_old', ['requeue', 'mask'])
def test_max_staleness_is_never_exceeded(tmp_path, too_old):
    "20 steps of two optimizer steps each, several turns a rollout, some of them far longer than a version lives."
    async def main():
        run = AsyncLoop(load_recipe('tiny', SMALL + f'algorithm.updates_per_batch=2 pool.too_old={too_old} limits.max_turns=4 limits.max_row_tokens=120 steps=20', out_dir=str(tmp_path/'run')), Slow)
        try:
            await run.start(); t = time.time()
            for _ in range(20): await run.step(); whole(run)
            seconds, alive = time.time()-t, await run._bridge(live(run))
        finally: await run.close()
        return run, seconds, alive
    run, seconds, alive = asyncio.run(main()); h = run.history; ledger, fates = whole(run)
    aborted, requeued, masked = (sum(x.get(k, 0) for x in h) for k in ('groups/aborted', 'groups/requeued', 'staleness/masked'))
    print(f'{too_old}: {seconds:.0f} s; staleness mean {np.mean([x["staleness/mean"] for x in h]):.2f}, max {max(x["staleness/max"] for x in h):.0f}; {aborted:.0f} aborted, {requeued:.0f} requeued, masked {masked/20:.3f}; {ledger}')
    assert h[-1]['optimizer_step'] == 40 and h[-1]['version'] == 19
    assert max(x['staleness/max'] for x in h) == 1 and all(abs(sum(v for k, v in x.items() if k.startswith('staleness/share/')) - 1) < 1e-6 for x in h)
    assert all(x['sync/mismatch'] <= 1e-4 for x in h)
    assert (aborted > 0 and requeued >= aborted and masked == 0) if too_old == 'requeue' else (aborted == 0 and masked > 0)
    assert ledger['ready'] == ledger['in_flight'] == 0 and not any(f['in flight'] for f in fates.values())
    trace = json.loads(save_trace(run.timeline, tmp_path/'trace.json').read_text())['traceEvents']
    spans, names = [e for e in trace if e['ph'] == 'X'], {e['pid']: e['args']['name'] for e in trace if e['ph'] == 'M'}
    assert set(names.values()) == {'prompt groups', 'engine0: rollouts', 'trainer', 'weight sync'} and {e['pid'] for e in spans} == set(names)
    assert all(set(e) == {'name', 'cat', 'ph', 'ts', 'dur', 'pid', 'tid'} and e['ts'] >= 0 and e['dur'] >= 0 for e in spans)
    assert sum(e['cat'] == 'policy' for e in spans) == 20 and sum(e['cat'] == 'wait' for e in spans) == 20
    for row in {(e['pid'], e['tid']) for e in spans}:                           # on one row of the picture nothing overlaps
        mine = sorted((e['ts'], e['dur']) for e in spans if (e['pid'], e['tid']) == row)
        assert all(a + d <= b + 1 for (a, d), (b, _) in zip(mine, mine[1:]))
