"""The committed evidence says what the README and notebook 20 say."""
import numpy as np, pytest
from molt_nb.inspector import read_metrics
from procs import ROOT

def rewards(name): return [m['reward/raw_mean'] for m in read_metrics(ROOT/'nbs'/'evidence'/name/'metrics.jsonl')]

def test_smollm2_learnt():
    r = rewards('smollm2-seed0'); assert np.mean(r[:2]) <= .3 and np.mean(r[-5:]) >= .6

@pytest.mark.parametrize('seed', [0, 1, 2])
def test_tiny_learnt(seed):
    r = rewards(f'tiny-seed{seed}'); assert np.mean(r[-10:]) - np.mean(r[:10]) >= .25

def test_exact_in_fp32():
    m = read_metrics(ROOT/'nbs'/'evidence'/'tiny-seed0'/'metrics.jsonl')
    assert m[0]['mismatch/abs_log_max'] <= 1e-4 and max(x['sync/mismatch'] for x in m) <= 1e-4
