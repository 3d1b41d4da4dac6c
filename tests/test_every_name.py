"""On the real stack every estimator and correction can be named in the recipe, and a teacher with the student's weights teaches exactly nothing."""
import asyncio, json, math, subprocess, sys, types
import pytest
from molt_nb import estimators
from molt_nb.async_loop import AsyncLoop, RunError
from molt_nb.corrections import CORRECTIONS
from molt_nb.estimators import ESTIMATORS
from molt_nb.recipes import RecipeError, load_recipe
from procs import ROOT

def test_they_run_by_name(tmp_path):
    "One run; between two steps its recipe names another estimator and another correction."
    async def main():
        run = AsyncLoop(load_recipe('tiny', 'algorithm.estimator=on_policy_distill algorithm.teacher=tiny pool.groups_per_batch=4 pool.groups_in_flight=6', out_dir=str(tmp_path/'run')))
        await run.start()
        try:
            first = await run.step(); a = run.recipe.algorithm; seen = {}
            for estimator, correction in zip(['on_policy_distill', *(e for e in ESTIMATORS if e not in ('gae', 'on_policy_distill'))], CORRECTIONS):
                a.estimator, a.correction, a.aggregation = estimator, correction, ESTIMATORS[estimator].aggregation or 'token_mean'
                a.correction_options = dict(seq_mask_tis=dict(low=.1, high=10.), flash=dict(high=1.)).get(correction, {})      # the default bands may reject all of a stale batch of four-token answers
                seen[estimator, correction] = await run.step()
            return first, seen
        finally: await run.close()
    first, seen = asyncio.run(main())
    assert len({c for _, c in seen}) == len(CORRECTIONS) == 7 and len({e for e, _ in seen}) == 7
    assert first['estimator/teacher_kl'] == 0 and first['estimator/advantage_abs'] == 0 and first['policy/grad_norm'] == 0
    for (estimator, _), m in list(seen.items())[1:]: assert m['policy/grad_norm'] > 0 and m['estimator/advantage_abs'] > 0 and math.isfinite(m['loss/policy']), estimator

def test_score_centering_a_kl_target_and_a_band_for_groups(tmp_path):
    "The engine's four likeliest tokens reach the loss, the KL coefficient moves towards its target, and groups outside of the band are counted."
    words = 'algorithm.score_centering=4 algorithm.correction_options.high=1.02 algorithm.kl_coef=0.1 algorithm.kl_target=1.0 pool.filter_high=0.7 pool.groups_per_batch=4 pool.groups_in_flight=6'
    async def main():
        run = AsyncLoop(load_recipe('tiny', words, out_dir=str(tmp_path/'run'))); seen = []; train = AsyncLoop._train
        async def spy(self, rollouts, rows, advantages, n): seen.append(rows); return await train(self, rollouts, rows, advantages, n)
        run._train = types.MethodType(spy, run); await run.start()
        try: return [await run.step() for _ in range(3)], seen
        finally: await run.close()
    history, batches = asyncio.run(main())
    for rows in batches:
        assert rows.top_tokens.shape == (*rows.tokens.shape, 4) and rows.top_logprobs[rows.mask].isfinite().all()
        hit = rows.top_tokens[rows.mask] == rows.tokens[rows.mask][:, None]
        assert hit.any() and (rows.top_logprobs[rows.mask] - rows.logprobs[rows.mask][:, None])[hit].abs().max() < 1e-5
    assert all(math.isfinite(m['loss/centering']) for m in history) and any(m['loss/centering'] for m in history)
    assert [m['loss/kl_coef'] for m in history[:2]] == pytest.approx([.1, .1*(1 - .2*len(batches[0].rollout.unique())/10_000)])      # loss/kl is far below its target
    assert all(m['reward/mean'] < .7 for m in history)

def test_training_on_the_first_groups_of_a_batch(tmp_path):
    "The batch in parts, as its groups complete, gives the step that the whole gives; an estimator that says per_group, and is not, stops the run before the step; so does a cell that asks for what cannot be done in parts, and an estimator that fails at its second part. Then the run goes on. A cell that changes the objective during a batch changes the next batch."
    words = 'pool.synchronous=true pool.filter_no_spread=false pool.groups_per_batch=4 pool.samples_per_group=6 algorithm.aggregation=seq_mean algorithm.kl_coef=0.01 algorithm.entropy_coef=0.001'
    async def main(parts):
        run = AsyncLoop(load_recipe('tiny', f'{words} pool.stream_groups={parts}', out_dir=str(tmp_path/f'run{parts}'))); made, told, locked = [], [], []
        part, every = run._part, run._all
        async def spy(groups, objective, first):
            made.append(len(groups)); told.append((first, objective)); out = await part(groups, objective, first)
            if len(run.history) == 2: run.recipe.algorithm.kl_coef = .02      # an edit between two parts of the third batch
            return out
        async def under_lock(what, *rest): locked.append(run._weights.locked()) if what == 'policy' and made else None; return await every(what, *rest)
        run._part, run._all = spy, under_lock; await run.start()
        try:
            seen = [await run.step() for _ in range(3)]
            if parts:
                third = [o for _, o in told][-[f for f, _ in reversed(told)].index(True)-1:]
                assert len(third) > 1 and len(set(third)) == 1 and [m['loss/kl_coef'] for m in seen] == [.01]*3 and all(locked)
                estimators.estimator(per_group=True)(fails); run.recipe.algorithm.estimator = 'fails'; before = run.version
                with pytest.raises(Exception, match='the second part'): await run.step()
                run.recipe.algorithm.estimator = 'grpo'; assert (await run.step())['loss/kl_coef'] == .02 and told[-1][1] != third[0] and run.version == before + 1
                estimators.estimator(per_group=True)(wrong); run.recipe.algorithm.estimator = 'wrong'; before = run.version
                with pytest.raises(RunError, match='says per_group'): await run.step()
                assert run.version == before
                for name, updates, why in (('reinforce_baseline', 1, 'looks at one group at a time'), ('grpo', 2, 'updates_per_batch=1')):
                    run.recipe.algorithm.estimator, run.recipe.algorithm.updates_per_batch, n = name, updates, len(made)
                    with pytest.raises(RunError, match=why): await run.step()
                    assert len(made) == n                              # before anything was computed
                run.recipe.algorithm.updates_per_batch, run.recipe.pool.stream_groups = 1, 0
                again = await run.step(); assert again['policy/grad_norm'] < 3*max(m['policy/grad_norm'] for m in seen) and run.version == before + 1      # nothing of the parts that were given up, and new groups
            return seen, made
        finally: await run.close(); [ESTIMATORS.pop(n, None) for n in ('wrong', 'fails')]
    calls = []
    def fails(rollouts, rows):
        calls.append(1)
        if len(calls) > 1: raise ValueError('the second part')
        return estimators.spread_over_rows(rollouts.reward*0, rows)
    def wrong(rollouts, rows): return estimators.spread_over_rows(rollouts.reward - rollouts.reward.mean(), rows)
    (whole, none), (parts, made) = asyncio.run(main(0)), asyncio.run(main(1))
    assert none == [] and len(made) > 4 and {'loss/kl', 'loss/entropy', 'estimator/advantage_abs', 'mismatch/k3', 'time/train', 'batch/computed'} <= parts[0].keys() == whole[0].keys()
    for k in ('reward/mean', 'loss/policy', 'loss/kl', 'loss/entropy', 'policy/grad_norm', 'policy/update_norm', 'estimator/advantage_abs', 'batch/tokens'): assert parts[0][k] == pytest.approx(whole[0][k], rel=1e-4, abs=1e-7), k

@pytest.mark.parametrize('words,fault', [('estimator=grpo critic.lr=0.001', 'asks no critic'), ('estimator=on_policy_distill', 'algorithm.teacher'), ('teacher=tiny', 'does not ask it'), ('estimator=flash_reinforce', "needs 'flash'"),
                                         ('correction=importance algorithm.correction_options={of: tv, mode: clip}', 'a tv is no weight'), ('estimator_options={kl_coef: 0.1}', "no option 'kl_coef'")])
def test_what_cannot_be_is_refused_before_anything_starts(words, fault):
    with pytest.raises(RecipeError, match=fault): load_recipe('tiny', f'algorithm.{words}')

def test_the_page_that_adds_one(tmp_path):
    "Notebook 16, all of it: its own asserts look at the log of the run."
    out = tmp_path/'out.ipynb'
    subprocess.run([sys.executable, '-m', 'papermill', '16_add_your_own.ipynb', str(out), '--no-progress-bar', '--log-level', 'ERROR'], cwd=ROOT/'nbs', check=True, timeout=600)
    assert '`estimator/winners`' in out.read_text() and all(c.get('execution_count') for c in json.loads(out.read_text())['cells'] if c['cell_type'] == 'code')
