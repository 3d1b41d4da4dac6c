"""Between two steps an edited estimator and an edited loss take effect; 50 syncs later a fresh request still agrees."""
import asyncio
import pytest, torch
from molt_nb import estimators, losses
from molt_nb.async_loop import AsyncLoop
from molt_nb.recipes import load_recipe

def test_edits_take_effect_at_the_next_step(tmp_path):
    async def main():
        run = AsyncLoop(load_recipe('tiny', 'pool.groups_per_batch=4 pool.groups_in_flight=6 policy.lr=1e-4', out_dir=str(tmp_path/'run')))
        await run.start(); first = await run.step()
        assert first['mismatch/abs_log_max'] <= 1e-4 and first['policy/update_norm'] > 0
        old, ppo = estimators.ESTIMATORS['grpo'], losses.LOSSES['ppo']
        try:
            estimators.ESTIMATORS['grpo'] = lambda rollouts, rows, **o: torch.zeros(rows.tokens.shape)     # no signal at all
            still = await run.step()
            assert still['policy/grad_norm'] == 0
            estimators.ESTIMATORS['grpo'] = old
            def tenfold(*a, **o):
                per_token, stats = ppo(*a, **o); return 10*per_token, stats
            normal = await run.step()
            losses.LOSSES['ppo'] = tenfold
            big = await run.step()
            assert big['policy/grad_norm'] > 3*normal['policy/grad_norm'] > 0
        finally: estimators.ESTIMATORS['grpo'], losses.LOSSES['ppo'] = old, ppo
        for version in range(run.version+1, 52): worst = (await run._bridge(run._publish(version)))['sync/mismatch']
        await run.close(); return worst
    assert asyncio.run(main()) <= 1e-5
