"""Old tokens on the real stack: what is too old is not trained, no task is lost, and each token of a rollout that crosses syncs belongs to its own version."""
import asyncio, json, random, sys, time
import numpy as np, pytest, ray, torch
from molt_nb.agents import Env, Limits
from molt_nb.async_loop import AsyncLoop, Runner
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
    "Arithmetic whose tool takes as long as several training steps for one task in six; a coin says what the last answer is worth."
    @classmethod
    def tasks(cls, n, seed): return [dict(id=f'{"slow" if i % 6 == 0 else "fast"}{i}', a=i) for i in range(n)]
    async def reset(self, task): self.task, self.turns = task, 0; return [dict(role='user', content=f'What is {task["a"]} + 1?')]
    async def step(self, action):
        self.turns += 1
        if self.task['id'].startswith('slow') and self.turns < 4: await asyncio.sleep(.8)
        return [dict(role='user', content='Again.')], float(self.turns == 4 and random.random() < .5), self.turns == 4, False, {}

async def live(run, n):
    "Wait until the engine has `n` requests."
    async with asyncio.timeout(20):
        while (found := (await asyncio.wrap_future(run.engines.handles['engine0'].status.remote().future()))['live']) != n: await asyncio.sleep(.05)
    return found

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
            seconds, alive = time.time()-t, await run._bridge(live(run, 0))
        finally: await run.close()
        return run, seconds, alive
    run, seconds, alive = asyncio.run(main()); h = run.history; ledger, fates = whole(run)
    aborted, requeued, masked = (sum(x.get(k, 0) for x in h) for k in ('groups/aborted', 'groups/requeued', 'staleness/masked'))
    print(f'{too_old}: {seconds:.0f} s; staleness mean {np.mean([x["staleness/mean"] for x in h]):.2f}, max {max(x["staleness/max"] for x in h):.0f}; {aborted:.0f} aborted, {requeued:.0f} requeued, masked {masked/20:.3f}; {ledger}')
    assert alive == 0 and h[-1]['optimizer_step'] == 40 and h[-1]['version'] == 19
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

def test_no_task_is_lost_at_the_end_of_the_data(tmp_path):
    "Two epochs of ten tasks in batches of four, two optimizer steps a batch: the last batch is what is left, the next step says None, each draw has one fate."
    class Ten(Slow):
        @classmethod
        def tasks(cls, n, seed): return [dict(id=f't{seed}-{i}', a=seed + i) for i in range(min(n, 10))]
    async def main():
        run = AsyncLoop(load_recipe('tiny', SMALL + 'algorithm.updates_per_batch=2 pool.filter_no_spread=false pool.epochs=2 limits.max_turns=4 limits.max_row_tokens=120', out_dir=str(tmp_path/'run')), Ten)
        try:
            await run.start()
            while await run.step(): whole(run)
            again = await run.step()
        finally: await run.close()
        return run, again
    run, again = asyncio.run(main()); ledger, fates = whole(run)
    assert again is None and [h['rollouts/trained'] for h in run.history] == [16]*5 and ledger['trained'] == 20
    assert len(fates) == 10 and all(f == {'trained': 2} for f in fates.values())


class Keeping(Policy):
    "A policy that remembers the weights of each version, and scores a row under any of them."
    def keep(self, version): self.kept = {**getattr(self, 'kept', {}), version: {k: v.clone() for k, v in self.model.state_dict().items()}}
    def score_at(self, version, ids):
        self.keep('now'); self.model.load_state_dict(self.kept[version]); out = self.score(ids); self.model.load_state_dict(self.kept['now']); return out
    def learn(self, turn, prompt, version):
        "A real optimizer step, on what was sampled."
        row = Segment(prompt); row.act(turn); _, rows, _ = make_batch([Trajectory([row], 1., 'ok', {}, 't', 'g', 'r')], 0)
        self.supervise(rows); self.keep(version)

@pytest.mark.parametrize('mode', ['reprefill', 'continue', 'drain'])
def test_tokens_belong_to_their_versions(cluster, mode):
    "Requests cross two syncs, with an optimizer step before each: every token has the log-prob of its own version, unless the KV was kept."
    path, engine, policy = cluster
    async def scene():
        sync = WeightSync([policy]); await sync.connect(dict(engine0=engine)); first = (await engine.status.remote())['version'] + 1
        await policy.keep.remote(first); await sync.publish(first)
        prompts = [[1, 50, 60, 90 + i] for i in range(4)]; sample = await engine.generate.remote(prompts[0], 60, 9)
        held = [asyncio.wrap_future(engine.generate.remote(p, 400, i).future()) for i, p in enumerate(prompts)]
        for version in (first + 1, first + 2):
            await engine.generate.remote(prompts[0], 60, 9); await engine.pause.remote('continue')      # the same row is a clock that counts steps; the others stand still while the trainer learns
            await policy.learn.remote(sample, prompts[0], version); await engine.resume.remote(); await sync.publish(version, mode)
        turns = await asyncio.gather(*held)
        scores = [{v: (await policy.score_at.remote(v, p + t.ids))[len(p):] for v in range(first, first + 3)} for p, t in zip(prompts, turns)]
        return first, turns, scores
    first, turns, scores = asyncio.run(scene()); own, other, crossed = [], [], 0
    for t, s in zip(turns, scores):
        v, lp = np.array(t.versions), np.array(t.logprobs); crossed += len(set(t.versions)) == 3
        assert (np.diff(v) >= 0).all()
        own.append(np.abs(lp - np.choose(v - first, [s[first], s[first+1], s[first+2]]))); other.append(np.abs(s[first] - s[first+2]))
    own, other = np.concatenate(own), np.concatenate(other); print(f'{mode}: {crossed} of 4 rows have three versions; |engine - trainer under the own version| max {own.max():.1e}, mean {own.mean():.1e}; two versions differ by {other.mean():.1e}')
    assert other.mean() > 1e-2                                                   # the weights did change
    if mode == 'drain': assert crossed == 0 and own.max() <= 1e-4
    else: assert crossed > 0 and (own.max() <= 1e-4) == (mode == 'reprefill')

@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    start_ray(4); ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])      # workers cannot import a test file
    path, config = random_tiny(tmp_path_factory.mktemp('model')/'tiny'), EngineConfig(request_timeout_s=60.0)
    engine = actor(Engine, engine_env(config), max_concurrency=64).remote(path, config, Sampling(), 'engine0')
    policy = actor(Keeping, policy_env(PolicyConfig())).remote(path, PolicyConfig(lr=3e-3))
    ray.get([engine.start.remote(), policy.build.remote()]); yield path, engine, policy
    ray.get(engine.stop.remote()); ray.shutdown()

def test_an_aborted_rollout_leaves_the_engine(cluster):
    "Cancelled in its runner, its request is gone from the engine, which is paused meanwhile: it cannot have ended by itself."
    path, engine, _ = cluster
    async def scene():
        runner = actor(Runner, dict(OMP_NUM_THREADS='1'), max_concurrency=16).remote(ray.cloudpickle.dumps(Slow), str(path), Limits(max_new_tokens=400, max_row_tokens=500))
        async def live(n):
            async with asyncio.timeout(20):
                while (await engine.status.remote())['live'] != n: await asyncio.sleep(.01)
        ref = runner.rollout.remote(dict(id='fast', a=1), 0, 0, 0, engine); await live(1)
        await engine.pause.remote('reprefill'); await asyncio.sleep(.5); await live(1)
        ray.cancel(ref); await live(0); await engine.resume.remote()
    asyncio.run(scene())
