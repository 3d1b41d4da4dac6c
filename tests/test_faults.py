"""What happens when a run dies: an engine that cannot start, Ctrl-C, a killed kernel. No process may be left behind."""
import os, signal
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

def test_killed_driver(tmp_path):
    "A kernel restart is a SIGKILL to the driver: Ray, the actors and the engine core go with it."
    with run(out=tmp_path/'run') as j:
        j.wait_for('reward', 300); os.kill(j.p.pid, signal.SIGKILL); j.p.wait()
        agents = ('ray::DashboardAgent', 'ray::RuntimeEnvAgent')     # Ray's own: they first try to tell a GCS that died with them, for a minute or two
        assert [c for c in j.left(60).values() if not c.startswith(agents)] == []
        assert j.left(180) == {}
