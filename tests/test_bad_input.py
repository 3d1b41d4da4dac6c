"""What papermill says when something is wrong: one clear message within a minute, an exit code that is not 0, nothing started, nothing left. No Ray here."""
import subprocess, time
import pytest
from procs import ROOT
from test_papermill import PAPERMILL, job

def test_parameters_are_shown():
    text = subprocess.run([*PAPERMILL, '--help-notebook', 'nbs/20_async_loop.ipynb'], cwd=ROOT, capture_output=True, text=True).stdout
    for name in ('model: str', 'steps: int', 'seed: int', 'out_dir: str', 'overrides: str'): assert name in text

@pytest.mark.parametrize('args, message', [
    (['-p', 'modle', 'tiny'], "there is no 'modle'"),
    (['-p', 'overrides', 'policy.learning_rate=1e-6'], "did you mean 'policy.lr'"),
    (['-p', 'overrides', 'model=no/such/dir'], 'no/such/dir'),
    (['-p', 'overrides', 'sampling.top_p=0.9 steps=0'], "'steps' is 0"),
])
def test_bad_input_is_one_clear_message(args, message, tmp_path):
    "Within a minute, exit code not 0, nothing left behind, nothing started."
    with job(*args, out=tmp_path/'out.ipynb') as j:
        t = time.time(); code = j.p.wait(120)
        assert code != 0 and message in j.out(), j.out()[-3000:]
        assert j.left(60) == {} and time.time()-t < 120

def test_agent_file_with_a_syntax_error(tmp_path):
    (tmp_path/'agent.py').write_text('class Mine(Env:\n    pass\n')
    with job('-p', 'overrides', f'task.agent={tmp_path}/agent.py', out=tmp_path/'out.ipynb') as j:
        assert j.p.wait(120) != 0 and 'line 1' in j.out() and 'agent.py' in j.out(), j.out()[-3000:]
        assert j.left() == {}
