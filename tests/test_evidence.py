"""The committed evidence says what the README and notebooks say."""
import json
from collections import Counter
from types import SimpleNamespace
import numpy as np, pytest
from molt_nb.async_loop import AsyncLoop
from molt_nb.inspector import read_metrics
from procs import ROOT
from prove import ALGORITHMS

def rewards(name): return [m['reward/raw_mean'] for m in read_metrics(ROOT/'nbs'/'evidence'/name/'metrics.jsonl') if m['speed/engine_tokens_per_s']]      # steps in which a rollout ended

def test_smollm2_learnt():
    r = rewards('smollm2-seed0'); assert np.mean(r[:2]) <= .3 and np.mean(r[-5:]) >= .6

@pytest.mark.parametrize('run,seed', [*((run, seed) for run in ('tiny', 'tiny-2x2', 'tiny-moe', 'tiny-moe-2x2', 'tiny-calc', 'tiny-tools') for seed in (0, 1, 2))])
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

def test_a_thousand_steps():
    "Nothing leaks, nothing is too old, nothing is lost; no process grows by more than 5% after step 100 (the smallest, of some 14 MB, by no more than 2 MB)."
    e = json.loads((ROOT/'nbs'/'evidence'/'endurance.json').read_text()); ledger = dict(e['ledger'])
    assert e['steps'] >= 1000 and e['optimizer_steps'] >= 2000 and e['staleness_max'] <= 1 and e['mismatch_max'] <= 1e-4 and e['live'] == 0
    assert ledger.pop('started') == sum(ledger.values()) and ledger['ready'] == ledger['in_flight'] == 0
    assert e['from_step'] == 100
    for name, mb in e['uss_mb'].items(): assert mb['1000'] - mb['100'] <= max(2, .05*mb['100']), name

@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_algorithm_learnt(name):
    "All estimators and presets on one task; three seeds."
    for seed in ALGORITHMS[name][2]:
        r = rewards(f'{name}-seed{seed}'); assert np.mean(r[-10:]) - np.mean(r[:10]) >= .25, seed

def test_the_student_learnt_from_its_teacher():
    "A fresh SmolLM2 closes at least 80% of the distance to the trained one, without a reward."
    folder = ROOT/'nbs'/'evidence'/'smollm2-distil-seed0'
    mean = lambda file, part: np.mean([m['reward/raw_mean'] for m in read_metrics(folder/file) if m['speed/engine_tokens_per_s']][part])
    first, last, goal = mean('metrics.jsonl', slice(1)), mean('metrics.jsonl', slice(-15, None)), mean('teacher.jsonl', slice(-15, None))      # four tasks a step: fewer steps scatter
    assert goal > .6 and last - first >= .8*(goal - first), (first, last, goal)

def test_a_step_in_which_no_rollout_ended_has_no_reward_of_zero():
    "The last known mean stands there until rollouts end again."
    tallies = iter([Counter(scored=4, reward=3., tokens=8), Counter(), Counter(scored=2, reward=0., tokens=4)])
    run = SimpleNamespace(pool=SimpleNamespace(check=lambda: None, take_tally=lambda: next(tallies), ready=[]), engines=SimpleNamespace(restarts={}), restarts=0, reruns=0, raw_mean=0.)
    assert [AsyncLoop._pool_stats(run, 1.)['reward/raw_mean'] for _ in range(3)] == [.75, .75, 0]
