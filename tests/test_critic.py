"""gae on the real stack: policy and critic on two ranks each; a warm-up in which the policy stands still; a critic rank that dies."""
import asyncio, ray
from molt_nb.async_loop import AsyncLoop, RunError
from molt_nb.recipes import load_recipe

def test_values_warm_up_and_loss_of_a_critic_rank(tmp_path):
    async def main():
        run = AsyncLoop(load_recipe('tiny', 'algorithm.estimator=gae policy.ranks=2 critic.warmup_steps=2 critic.updates_per_batch=2 critic.lr=0.001 critic.clip=0.5 pool.groups_per_batch=4', out_dir=str(tmp_path/'run')))
        await run.start()
        try:
            seen = [await run.step() for _ in range(4)]
            ray.kill(run.critics[1])
            try: await run.step(); said = ''
            except RunError as e: said = str(e)
            return seen, said, await asyncio.to_thread(ray.get, [p.score.remote([5, 6, 7]) for p in run.policies])
        finally: await run.close()
    seen, said, scores = asyncio.run(main())
    column = lambda k: [m.get(k) for m in seen]
    print(said, *({k: column(k) for k in ('critic/warmup', 'optimizer_step', 'value/mean', 'critic/grad_norm', 'loss/value', 'time/train', 'time/critic')}.items()), sep='\n')
    assert column('critic/warmup') == [1, 1, 0, 0] and column('optimizer_step') == [0, 0, 1, 2] and column('version') == [0, 1, 2, 3]
    assert [m is None for m in column('policy/grad_norm')] == [True, True, False, False] and max(column('sync/mismatch')) <= 1e-4
    assert column('value/mean')[0] == 0 and all(abs(v) > 0 for v in column('value/mean')[1:]) and all(g > 0 for g in column('critic/grad_norm'))
    assert 'critic1' in said and 'died' in said and len(scores) == 2       # the policy's ranks live, and are told apart
