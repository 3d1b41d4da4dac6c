"""What happens when a run dies: an engine that cannot start, Ctrl-C, a killed kernel. No process may be left behind."""
import os, signal, time
import pytest
from procs import python

RUN = '''
import asyncio, sys, time
from molt_nb.async_loop import AsyncLoop
from molt_nb.recipes import load_recipe
async def main():
    run = AsyncLoop(load_recipe('tiny', {overrides!r}))
    try:
        await run.start(); print('started', flush=True)
        while True: print('reward', (await run.step())['reward/mean'], flush=True)
    finally: await run.close(); print('closed', flush=True)
asyncio.run(main())
'''
def run(overrides='', out='', **kw): return python(RUN.format(overrides=f'out_dir={out} {overrides}'.split()), **kw)

AGENTS = ('ray::DashboardAgent', 'ray::RuntimeEnvAgent')     # Ray's own: they first try, for a minute or two, to tell a GCS that died with them

@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    "A run whose driver is killed: what a kernel restart does."
    with run(out=tmp_path_factory.mktemp('killed')/'run') as j:
        j.wait_for('reward', 300); os.kill(j.p.pid, signal.SIGKILL); j.p.wait(); yield j

def test_killed_driver(killed):
    "The actors and the engine core go with it, and Ray but for its agents."
    end = time.time() + 60
    while (ours := [c for c in killed.left(0).values() if not c.startswith(AGENTS)]) and time.time() < end: time.sleep(.3)
    assert ours == []

def test_engine_that_cannot_start(tmp_path):
    "The cause is said in one message, and everything that did start is taken down."
    with run('engine.kv_cache_mb=1 engine.max_model_len=100000', tmp_path/'run') as j:
        assert j.p.wait(300) != 0          # other tests run beside it
        assert 'engine0' in j.out().splitlines()[-1] or 'engine0' in j.out(), j.out()[-3000:]
        assert j.left(120) == {}

def test_ctrl_c(tmp_path):
    with run(out=tmp_path/'run') as j:
        j.wait_for('reward', 300); os.kill(j.p.pid, signal.SIGINT)
        assert j.p.wait(120) != 0
        assert j.left(120) == {}, j.out()[-2000:]

def test_agents_of_the_killed_driver(killed):
    "Last, because they take their time."
    assert killed.left(180) == {}
