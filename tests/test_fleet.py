"""Two engines and two policy ranks; then an engine and the runner are killed in the middle of the run."""
import asyncio, os, signal
from collections import Counter
from molt_nb.async_loop import AsyncLoop
from molt_nb.recipes import load_recipe

FLEET = 'engines=2 policy.ranks=2 pool.groups_per_batch=4 pool.groups_in_flight=8 '

def test_an_engine_and_a_runner_die(tmp_path):
    "Their rollouts run once more, the run goes on, the new engine passes the probe, and nothing is trained twice."
    async def main():
        run = AsyncLoop(load_recipe('tiny-moe', FLEET + 'policy.expert_parallel=2', out_dir=str(tmp_path/'run')))
        trained, next_batch = Counter(), None
        try:
            await run.start(); next_batch = run.pool.next_batch
            async def noted(*a):
                groups = await next_batch(*a); trained.update(t.rollout_id for g in groups for t in g.trajectories); return groups
            run.pool.next_batch = noted
            for _ in range(3): await run.step()
            assert all(h['sync/engines'] == 2 and h['sync/mismatch'] <= 1e-4 for h in run.history) and run.history[0]['mismatch/abs_log_max'] <= 1e-4
            assert all(h['moe/load_max'] >= 1 for h in run.history)
            status = await asyncio.wrap_future(run.engines.handles['engine1'].status.remote().future()); os.kill(status['pid'], signal.SIGKILL)
            for _ in range(3): await run.step()                                                  # it goes on with one engine
            assert run.history[-1]['sync/engines'] == 1
            async with asyncio.timeout(240):
                while run.engines.router.state['engine1'] != 'new': await asyncio.sleep(.2)      # its replacement has started
            await run.step()                                                                      # and joins at the next publication
            assert run.engines.restarts == {'engine1': 1} and run.history[-1]['sync/engines'] == 2, run.engines.events
            assert sum(h['engine/restarts'] for h in run.history) == 1 and sum(h['rollouts/rerun'] for h in run.history) > 0
            pid = await asyncio.wrap_future(run.runners[0].ready.remote().future()); before = sum(h['rollouts/rerun'] for h in run.history); os.kill(pid, signal.SIGKILL)
            for _ in range(3): await run.step()
            assert all(h['sync/mismatch'] <= 1e-4 and h['rollouts/error'] == 0 for h in run.history)
            ledger = run.pool.ledger(); assert ledger['started'] == sum(v for k, v in ledger.items() if k != 'started')
            assert set(trained.values()) == {1}
            return run.history, run.engines.events, before
        finally: await run.close()
    history, events, before = asyncio.run(main())
    print(*(e for _, e in events), f"{len(history)} steps, {sum(h['rollouts/rerun'] for h in history):.0f} rollouts run again ({before:.0f} for the engine)", sep='\n')
