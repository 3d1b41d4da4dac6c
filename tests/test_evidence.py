"""The committed evidence says what the README and notebook 20 say."""
import numpy as np, pytest
from molt_nb.inspector import read_metrics
from procs import ROOT

def rewards(name): return [m['reward/raw_mean'] for m in read_metrics(ROOT/'nbs'/'evidence'/name/'metrics.jsonl')]

def test_smollm2_learnt():
    r = rewards('smollm2-seed0'); assert np.mean(r[:2]) <= .3 and np.mean(r[-5:]) >= .6

@pytest.mark.parametrize('run,seed', [*((run, seed) for run in ('tiny', 'tiny-2x2', 'tiny-moe', 'tiny-moe-2x2', 'tiny-calc') for seed in (0, 1, 2)), ('tiny-tools', 0)])
def test_tiny_learnt(run, seed):
    "One engine and one rank, or two of each: it learns, and engine and trainer agree after every sync, on every engine."
    m = read_metrics(ROOT/'nbs'/'evidence'/f'{run}-seed{seed}'/'metrics.jsonl'); r = [x['reward/raw_mean'] for x in m]
    assert np.mean(r[-10:]) - np.mean(r[:10]) >= .25
    assert m[0]['mismatch/abs_log_max'] <= 1e-4 and max(x['sync/mismatch'] for x in m) <= 1e-4
    if run.endswith('2x2'): assert {x['sync/engines'] for x in m} == {2}

@pytest.mark.parametrize('seed', [0, 1, 2])
def test_gae_with_a_critic_learnt(seed):
    "The multi-turn task; a warm-up in which only the critic learns, from values of exactly 0."
    m = read_metrics(ROOT/'nbs'/'evidence'/f'tiny-calc-gae-seed{seed}'/'metrics.jsonl'); r = [x['reward/raw_mean'] for x in m]
    assert np.mean(r[-10:]) - np.mean(r[:10]) >= .25 and max(x['sync/mismatch'] for x in m) <= 1e-4
    warm = [x['critic/warmup'] for x in m]; assert sum(warm) == 5 == sum(warm[:5]) and m[4]['optimizer_step'] == 0 < m[5]['optimizer_step']
    assert m[0]['value/mean'] == 0
