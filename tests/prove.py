"""The long evidence: the demo as a user runs it; `tiny` and `tiny-moe` with one engine and one policy rank, and with two of each; three seeds each.
Writes nbs/evidence/, which is committed; afterwards `make run-nb NB=20_async_loop` shows it on the page.

    python tests/prove.py [NAME ...]      default: all of RUNS; about 45 minutes on two cores"""
import shutil, subprocess, sys, time
from pathlib import Path
from notebooks import NBS, ROOT

EVIDENCE = NBS/'evidence'
TWO = 'engines=2 runners=2 policy.ranks=2'
RUNS = {'smollm2': ('smollm2', '', [0]), 'tiny': ('tiny', '', [0, 1, 2]), 'tiny-moe': ('tiny-moe', '', [0, 1, 2]),        # name: (recipe, overrides, seeds)
        'tiny-calc': ('tiny-calc', '', [0, 1, 2]), 'tiny-tools': ('tiny-tools', '', [0, 1, 2]), 'tiny-2x2': ('tiny', TWO, [0, 1, 2]), 'tiny-moe-2x2': ('tiny-moe', f'{TWO} policy.expert_parallel=2', [0, 1, 2])}

def prove(name, model, overrides, seed):
    run = ROOT/'runs'/f'prove-{time.strftime("%Y%m%d-%H%M%S")}-{name}-{seed}'; run.mkdir(parents=True)
    subprocess.run([sys.executable, '-m', 'papermill', 'nbs/20_async_loop.ipynb', str(run/'20_async_loop.ipynb'), '--stdout-file', '/dev/stdout', '--log-level', 'ERROR', '--no-progress-bar',
                    '-p', 'model', model, '-p', 'seed', str(seed), '-p', 'out_dir', str(run), *(['-p', 'overrides', overrides] if overrides else [])], cwd=ROOT, check=True)
    to = EVIDENCE/f'{name}-seed{seed}'; to.mkdir(parents=True, exist_ok=True)
    for f in ('metrics.jsonl', 'answers.json', 'recipe.yaml'): shutil.copy(run/f, to/f)
    recipe = (to/'recipe.yaml').read_text().replace(str(run), f'runs/{name}').replace(f'{ROOT}/', ''); (to/'recipe.yaml').write_text(recipe)

def picture():
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    from molt_nb.inspector import _smooth, read_metrics
    m = read_metrics(EVIDENCE/'smollm2-seed0'/'metrics.jsonl'); r = [h['reward/raw_mean'] for h in m]; minutes = sum(h['time/step'] for h in m)/60
    fig, ax = plt.subplots(figsize=(7, 3)); ax.plot(r, '.', alpha=.4, label='one batch'); ax.plot(_smooth(r), color='C0', label='mean of five')
    ax.set(xlabel=f'training step ({minutes:.1f} minutes on two CPU cores)', ylabel='mean reward', ylim=(0, 1)); ax.legend(); fig.tight_layout(); fig.savefig(EVIDENCE/'learning_curve.png', dpi=90)

if __name__ == '__main__':
    for name in sys.argv[1:] or RUNS:
        model, overrides, seeds = RUNS[name]
        for seed in seeds: prove(name, model, overrides, seed)
    picture()
