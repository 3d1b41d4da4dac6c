"""Ten reasoning-gym families, three Gymnasium environments, a calculator, a Python tool, and environments that misbehave, all in one run on the real stack; then a data set."""
import asyncio, json
from collections import Counter
import pytest, ray
from molt_nb.adapters import from_gymnasium
from molt_nb.agents import Env, make_tasks
from molt_nb.async_loop import AsyncLoop
from molt_nb.recipes import RecipeError, load_recipe
from molt_nb.tasks import ReasoningGym, last_int
from molt_nb.tools import Calculator, PythonTool

FAMILIES = 'chain_sum spell_backward leg_counting basic_arithmetic gcd letter_counting number_sorting caesar_cipher base_conversion word_sorting'.split()
GYMS = ('FrozenLake-v1', 'CliffWalking-v1', 'Blackjack-v1')
FAULTS = dict(raises='error', hangs='error', nan='invalid', text='invalid', nothing='invalid', list='invalid')


class Faulty(Env):
    "Answers with a reward that is none, or not at all."
    def reset(self, task): self.fault = task['fault']; return 'What is 1 + 2?'
    async def step(self, action):
        if self.fault == 'raises': raise RuntimeError('the world broke')
        if self.fault == 'hangs': await asyncio.sleep(60)
        return '', dict(nan=float('nan'), text='1.0', nothing=None, list=[1.0])[self.fault], True, False, {}

def gyms():
    "Made where they are used: their classes are Python, not data."
    return {g: from_gymnasium(g, describe=(lambda o, env: f'Your hand: {o[0]}. The dealer shows {o[1]}.') if g.startswith('Black') else None) for g in GYMS}

class Mixture(Env):
    "Each task names its environment."
    @classmethod
    def tasks(cls, n, seed):
        every = [dict(t, of='reasoning') for f in FAMILIES for t in make_tasks(ReasoningGym, 1, seed, dataset=f)]
        every += [dict(t, of=g) for g, env in gyms().items() for t in make_tasks(env, 1, seed)]
        every += [dict(make_tasks(Calculator, 1, seed)[0], of='calculator'), dict(make_tasks(PythonTool, 1, seed)[0], of='python')]
        return every + [dict(id=f'{f}-{seed}', fault=f, seed=seed, of='faulty') for f in FAULTS]
    def __init__(self, **options): self.env = None
    def reset(self, task):
        self.env = dict(reasoning=ReasoningGym, calculator=Calculator, python=PythonTool, faulty=Faulty, **gyms())[task['of']]()
        return self.env.reset(task)
    def step(self, action): return self.env.step(action)
    def close(self): return self.env.close() if self.env else None


async def played(overrides, steps, agent=None, until=lambda seen, run: True):
    "Train `steps` steps, and on until `until`: the run, its ledger, and every trajectory by its task's id."
    seen, run = {}, AsyncLoop(load_recipe('tiny', overrides), agent=agent)
    try:
        await run.start(); rollout = run.pool.rollout
        async def noted(task, *a):
            t = await rollout(task, *a); seen.setdefault(task['id'], []).append(t); return t
        run.pool.rollout = noted
        while len(run.history) < steps or not until(seen, run): await run.step()
        return run, run.pool.ledger(), seen
    finally: await run.close()


def test_all_of_them_run(tmp_path):
    "Every environment gives its outcome; a faulty one costs its own rollouts and the run goes on."
    run, ledger, seen = asyncio.run(played(['limits.max_turns=3', 'limits.max_new_tokens=8', 'limits.max_row_tokens=900', 'limits.step_timeout_s=15', 'engine.max_model_len=1024', 'pool.samples_per_group=2',
                                            'pool.groups_per_batch=5', 'pool.filter_no_spread=false', 'pool.max_failure_rate=1.0', 'pool.max_staleness=5', 'algorithm.kl_coef=1e-3', f'out_dir={tmp_path}/run', 'show_rollouts=1'],
                                           5, Mixture, lambda seen, run: len(seen) >= len(run.tasks)))
    history = run.history
    for t in run.tasks:
        outcomes = {x.outcome for x in seen[t['id']]}
        if t['of'] == 'faulty': assert outcomes == {FAULTS[t['fault']]} and all(x.reason for x in seen[t['id']]), (t, outcomes)
        else: assert outcomes <= {'ok', 'truncated'}, (t['id'], [x.reason for x in seen[t['id']]])
    assert sum(h['rollouts/error'] + h['rollouts/invalid'] for h in history) > 0 and all(h['sync/mismatch'] <= 1e-4 for h in history)
    assert all('loss/kl' in h for h in history) and abs(history[0]['loss/kl']) < 1e-6 and history[-1]['loss/kl'] > 0     # the reference is where training starts from
    assert ledger['started'] == sum(v for k, v in ledger.items() if k != 'started')
    print(Counter(x.outcome for ts in seen.values() for x in ts))


def sums_file(folder):
    "81 questions with their answers, one a line."
    rows = [dict(question=f'What is {a} + {b}?', total=a + b) for a in range(1, 10) for b in range(1, 10)]
    (folder/'sums.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return rows

def data_set(folder, prompt): return ['task.agent=dataset', f"task.options={{path: {folder}/sums.jsonl, prompt: '{prompt}', answer: total}}", f'out_dir={folder}/run']

def test_a_wrong_column_starts_nothing(tmp_path):
    sums_file(tmp_path)
    with pytest.raises(RecipeError, match="line 1: no column 'qestion'. Did you mean 'question'?"): load_recipe('tiny', data_set(tmp_path, '{qestion} Reply with just the number.'))
    assert not ray.is_initialized() and not (tmp_path/'run').exists()

def test_a_data_set_is_trained_on(tmp_path):
    "A file of questions and answers: each rollout answers its line, and its reward is the grader's."
    rows = sums_file(tmp_path)
    run, ledger, seen = asyncio.run(played(data_set(tmp_path, '{question} Reply with just the number.') + ['pool.groups_per_batch=4', 'pool.groups_in_flight=6'], 3))
    said = lambda t: run.tokenizer.decode(t.segments[0].tokens[t.segments[0].action_mask], skip_special_tokens=True)
    for id, trajectories in seen.items():
        row = rows[int(id.removeprefix('sums-line')) - 1]
        for t in trajectories:
            assert f"{row['question']} Reply with just the number." in run.tokenizer.decode(t.segments[0].tokens) and t.info['answer'] == row['total']
            assert t.reward == float(last_int(said(t)) == row['total'])
    rewards = [t.reward for ts in seen.values() for t in ts]
    assert 0 < sum(rewards) < len(rewards) and ledger['started'] == sum(v for k, v in ledger.items() if k != 'started')
    assert all(h['policy/update_norm'] > 0 and h['sync/mismatch'] <= 1e-4 for h in run.history) and run.version == 3
