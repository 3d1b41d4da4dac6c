"""The long evidence: the demo as a user runs it, and three seeds of `tiny`. Writes nbs/evidence/, which is committed, and executes the pages that show it.

    python tests/prove.py [smollm2] [tiny]      default: both; about 15 minutes on two cores"""
import shutil, subprocess, sys, time
from pathlib import Path
from notebooks import NBS, ROOT

EVIDENCE = NBS/'evidence'
RUNS = dict(smollm2=[('smollm2', 0)], tiny=[('tiny', s) for s in (0, 1, 2)])

def prove(model, seed):
    run = ROOT/'runs'/f'prove-{time.strftime("%Y%m%d-%H%M%S")}-{model}-{seed}'; run.mkdir(parents=True)
    subprocess.run([sys.executable, '-m', 'papermill', 'nbs/20_async_loop.ipynb', str(run/'20_async_loop.ipynb'), '--stdout-file', '/dev/stdout', '--log-level', 'ERROR', '--no-progress-bar',
                    '-p', 'model', model, '-p', 'seed', str(seed), '-p', 'out_dir', str(run)], cwd=ROOT, check=True)
    to = EVIDENCE/f'{model}-seed{seed}'; to.mkdir(parents=True, exist_ok=True)
    for name in ('metrics.jsonl', 'answers.json', 'recipe.yaml'): shutil.copy(run/name, to/name)
    recipe = (to/'recipe.yaml').read_text().replace(str(run), f'runs/{model}'); (to/'recipe.yaml').write_text(recipe)

def picture():
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    from molt_nb.inspector import _smooth, read_metrics
    m = read_metrics(EVIDENCE/'smollm2-seed0'/'metrics.jsonl'); r = [h['reward/raw_mean'] for h in m]; minutes = sum(h['time/step'] for h in m)/60
    fig, ax = plt.subplots(figsize=(7, 3)); ax.plot(r, '.', alpha=.4, label='one batch'); ax.plot(_smooth(r), color='C0', label='mean of five')
    ax.set(xlabel=f'training step ({minutes:.1f} minutes on two CPU cores)', ylabel='mean reward', ylim=(0, 1)); ax.legend(); fig.tight_layout(); fig.savefig(EVIDENCE/'learning_curve.png', dpi=90)

if __name__ == '__main__':
    for name in sys.argv[1:] or RUNS:
        for model, seed in RUNS[name]: prove(model, seed)
    picture()
