"""The long evidence: the demo as a user runs it; `tiny` and `tiny-moe` with one engine and one policy rank, and with two of each; three seeds each.
Writes nbs/evidence/, which is committed; afterwards `make run-nb NB=20_async_loop` shows it on the page.

    python tests/prove.py [NAME ...]      default: all of RUNS; about 45 minutes on two cores, and some two minutes for each of the 39 runs of `algorithms`
    python tests/prove.py tiny-calc-gae   the multi-turn task with gae and a critic: the picture and the table of notebook 22_critic
    python tests/prove.py smollm2-distil  SmolLM2 trained for 30 steps (runs/teacher-smollm2), then distilled into a fresh one for 45
    python tests/prove.py algorithms      every estimator and every preset on `tiny`: the picture and the table of notebook 16"""
import shutil, subprocess, sys, time
from pathlib import Path
from notebooks import NBS, ROOT

EVIDENCE = NBS/'evidence'
TWO = 'engines=2 runners=2 policy.ranks=2'
RUNS = {'smollm2': ('smollm2', '', [0]), 'smollm2-padded': ('smollm2', 'policy.packing=none policy.share_prompts=false', [0]), 'tiny': ('tiny', '', [0, 1, 2]), 'tiny-moe': ('tiny-moe', '', [0, 1, 2]),        # name: (recipe, overrides, seeds)
        'tiny-calc': ('tiny-calc', '', [0, 1, 2]), 'tiny-tools': ('tiny-tools', '', [0, 1, 2]), 'tiny-2x2': ('tiny', TWO, [0, 1, 2]), 'tiny-moe-2x2': ('tiny-moe', f'{TWO} policy.expert_parallel=2', [0, 1, 2])}
TEACHERS = {f'runs/{d}/model': m for d, m in (('teacher', 'tiny'), ('teacher-smollm2', 'smollm2'))}      # directory: recipe that makes it
(TEACHER, BIG), UNFILTERED, STALE = TEACHERS, 'pool.filter_no_spread=false', 'pool.max_staleness=4 pool.groups_in_flight=24 pool.queue_groups=12'
GAE = 'algorithm.estimator=gae critic.warmup_steps=5 critic.lr=1.0e-3'
ALGORITHMS = {f'estimator-{e}': ('tiny', f'algorithm.estimator={e} {more}'.strip(), [0, 1, 2]) for e, more in dict(reinforce='', reinforce_baseline='', rloo='', grpo='', dr_grpo='algorithm.aggregation=fixed', gae='',
                  on_policy_distill=f'algorithm.teacher={TEACHER} {UNFILTERED}', flash_reinforce=f'algorithm.aggregation=seq_mean algorithm.correction=flash {UNFILTERED}').items()}
ALGORITHMS |= {f'correction-{c}': ('tiny', f'algorithm.correction={c} {more} {STALE}'.replace('  ', ' '), [0, 1, 2]) for c, more in dict(tis='', icepop='', mis='', seq_mask_tis='algorithm.correction_options.low=0.8 algorithm.correction_options.high=1.25',
                   flash='algorithm.correction_options.high=0.1').items()}      # the default bands are made for long rollouts; these have four tokens
RUNS |= ALGORITHMS
RUNS |= {'tiny-calc-gae': ('tiny-calc', GAE, [0, 1, 2]), 'smollm2-distil': ('smollm2', f'algorithm.estimator=on_policy_distill algorithm.teacher={BIG} {UNFILTERED} steps=45 max_minutes=20', [0])}

def refused(model, overrides):
    "Why the recipe cannot run; empty if it can. What a run needs made first is made."
    from molt_nb.recipes import RecipeError, load_recipe
    for path in (p for p in TEACHERS if p in overrides and not (ROOT/p).exists()):
        run = (ROOT/path).parent; run.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, '-m', 'papermill', 'nbs/20_async_loop.ipynb', str(run/'20_async_loop.ipynb'), '--log-level', 'ERROR', '--no-progress-bar', '-p', 'model', TEACHERS[path], '-p', 'out_dir', str(run), '-p', 'overrides', 'save=true' + ' steps=30 max_minutes=20'*(path == BIG)], cwd=ROOT, check=True)
    try: load_recipe(model, overrides); return ''
    except RecipeError as e: return '; '.join(e.faults)

def prove(name, model, overrides, seed):
    run = ROOT/'runs'/f'prove-{time.strftime("%Y%m%d-%H%M%S")}-{name}-{seed}'; run.mkdir(parents=True)
    subprocess.run([sys.executable, '-m', 'papermill', 'nbs/20_async_loop.ipynb', str(run/'20_async_loop.ipynb'), '--stdout-file', '/dev/stdout', '--log-level', 'ERROR', '--no-progress-bar',
                    '-p', 'model', model, '-p', 'seed', str(seed), '-p', 'out_dir', str(run), *(['-p', 'overrides', overrides] if overrides else [])], cwd=ROOT, check=True)
    to = EVIDENCE/f'{name}-seed{seed}'; to.mkdir(parents=True, exist_ok=True)
    for f in ('metrics.jsonl', 'answers.json', 'recipe.yaml'): shutil.copy(run/f, to/f)
    if BIG in overrides: shutil.copy(ROOT/BIG/'..'/'metrics.jsonl', to/'teacher.jsonl')
    recipe = (to/'recipe.yaml').read_text().replace(str(run), f'runs/{name}').replace(f'{ROOT}/', ''); (to/'recipe.yaml').write_text(recipe)

def picture():
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    from molt_nb.inspector import _smooth, read_metrics
    m = read_metrics(EVIDENCE/'smollm2-seed0'/'metrics.jsonl'); r = [h['reward/raw_mean'] for h in m]; minutes = sum(h['time/step'] for h in m)/60
    fig, ax = plt.subplots(figsize=(7, 3)); ax.plot(r, '.', alpha=.4, label='one batch'); ax.plot(_smooth(r), color='C0', label='mean of five')
    ax.set(xlabel=f'training step ({minutes:.1f} minutes on two CPU cores)', ylabel='mean reward', ylim=(0, 1)); ax.legend(); fig.tight_layout(); fig.savefig(EVIDENCE/'learning_curve.png', dpi=90)

def compare_algorithms():
    "nbs/evidence/algorithms.png and .md: reward curves over seeds, and what each run's log says of it."
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt, numpy as np
    from molt_nb.inspector import _smooth, read_metrics
    logs = {n: [read_metrics(f) for s in seeds if (f := EVIDENCE/f'{n}-seed{s}'/'metrics.jsonl').exists()] for n, (_, _, seeds) in ALGORITHMS.items()}
    fig, axes = plt.subplots(3, 5, figsize=(11, 5.5), sharex=True, sharey=True)
    table = ['| | reward, first ten steps | last ten | seeds | staleness | KL(engine, trainer) | rejected | effective sample |', '|---|---|---|---|---|---|---|---|']
    for ax in axes.flat[len(logs):]: ax.axis('off')
    for ax, (n, runs) in zip(axes.flat, logs.items()):
        ax.set_title(n.split('-')[1], fontsize=9); ax.set_ylim(0, 1); why = '' if runs else refused(*ALGORITHMS[n][:2]) or 'not run'
        if why: table.append(f'| {n} | {why} | | | | | | |'); continue
        for m in runs: ax.plot(_smooth([h['reward/raw_mean'] for h in m if h['speed/engine_tokens_per_s']]), lw=1)
        over = lambda k, part=slice(None): [np.mean([h[k] for h in m if h.get(k) is not None and (k != 'reward/raw_mean' or h['speed/engine_tokens_per_s'])][part]) for m in runs]       # where no rollout ended, nothing is known of rewards
        show = lambda k, part=slice(None): f'{np.mean(over(k, part)):.2f} ± {np.std(over(k, part)):.2f}'
        table.append('| ' + ' | '.join([n, show('reward/raw_mean', slice(10)), show('reward/raw_mean', slice(-10, None)), str(len(runs)), show('staleness/mean'), f"{np.mean(over('mismatch/k3')):.1e}", show('correction/rejected_fraction'), show('correction/ess')]) + ' |')
    fig.supxlabel('training step'); fig.supylabel('mean reward'); fig.tight_layout(); fig.savefig(EVIDENCE/'algorithms.png', dpi=80)
    (EVIDENCE/'algorithms.md').write_text('\n'.join(table) + '\n')

if __name__ == '__main__':
    wanted = sys.argv[1:] or list(RUNS)
    for name in [n for w in wanted for n in (ALGORITHMS if w == 'algorithms' else [w])]:
        model, overrides, seeds = RUNS[name]
        if why := refused(model, overrides): print(f'{name} is refused: {why}', flush=True); continue
        for seed in seeds: prove(name, model, overrides, seed)
    if (EVIDENCE/'smollm2-seed0').exists(): picture()
    compare_algorithms()
