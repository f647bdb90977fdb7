"""The chat template of a tokenizer folder: which one is used, and what it renders, against transformers."""

import pytest
from transformers import AutoTokenizer

from nanovllm.errors import RequestError
from nanovllm.text.chat_template import _END_MARK, MAX_RENDERED_CHARS
from nanovllm.text.tokenizer import Tokenizer
from tests.text.tokenizer_files import ASSISTANT, CHATS, SYSTEM, TOOLS, USER, edit_json

# ---- which template is used ----


def template_sources(folder, *, jinja, config, extra):
    edit_json(folder / "tokenizer_config.json", chat_template=config)
    if jinja:
        (folder / "chat_template.jinja").write_text("jinja {{ messages | length }}é", encoding="utf-8")
    if extra:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("extra {{ tools | tojson }}")


NAMED_TEMPLATES = [{"name": "default", "template": "list-default"}, {"name": "tool_use", "template": "list-tools"}]


@pytest.mark.parametrize("tools", [None, [], TOOLS])
@pytest.mark.parametrize("config", ["config", NAMED_TEMPLATES, NAMED_TEMPLATES[:1]])
@pytest.mark.parametrize("jinja, extra", [(False, False), (True, False), (True, True)])
def test_the_template_transformers_would_take(folder, jinja, extra, config, tools):
    template_sources(folder, jinja=jinja, config=config, extra=extra)
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template([USER], tools=tools, tokenize=False)
    assert Tokenizer.from_dir(folder).render_chat([USER], tools=tools, add_generation_prompt=False) == theirs


def test_chat_template_json_is_the_last_resort(folder):
    edit_json(folder / "chat_template.json", chat_template="from json")
    assert Tokenizer.from_dir(folder).render_chat([USER]).startswith("<|im_start|>")
    edit_json(folder / "tokenizer_config.json", chat_template=...)
    assert Tokenizer.from_dir(folder).render_chat([USER]) == "from json"


@pytest.mark.parametrize(
    "chat_template, found", [(..., "no chat template"), (NAMED_TEMPLATES[1:], r"only .*'tool_use'")]
)
def test_no_template(folder, chat_template, found):
    edit_json(folder / "tokenizer_config.json", chat_template=chat_template)
    tokenizer = Tokenizer.from_dir(folder)
    with pytest.raises(RequestError, match=f"the model has {found}.*put one into chat_template.jinja"):
        tokenizer.render_chat([USER])


# ---- rendering ----


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_rendering_equals_transformers(pair, chat, tools, add_generation_prompt, options):
    ours, theirs = pair
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **options}
    expected = theirs.apply_chat_template(chat, tokenize=False, **options)
    assert ours.render_chat(chat, **options) == expected
    ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(chat, **options) == ids


# The manner of Gemma's: the system message goes into the first turn, turns must alternate, content may be a list.
FOLDED_SYSTEM = """{{ bos_token }}
{%- set first, turns = "", messages -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set first = (messages[0]["content"] if messages[0]["content"] is string else messages[0]["content"][0]["text"])
        + "\n\n" -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn["role"] == "user") != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("turns must alternate") }}
    {%- endif -%}
    {{ "<turn>" + ("model" if turn["role"] == "assistant" else turn["role"]) + "\n" + (first if loop.first else "") }}
    {%- if turn["content"] is string -%}
        {{ turn["content"] | trim }}
    {%- elif turn["content"] is iterable -%}
        {%- for part in turn["content"] -%}
            {{ "<image>" if part["type"] == "image" else part["text"] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ "</turn>\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<turn>model\n" }}{%- endif -%}"""


@pytest.mark.parametrize("system", [[], [SYSTEM], [{"role": "system", "content": [{"type": "text", "text": "Be."}]}]])
def test_a_template_that_folds_the_system_message(folder, system):
    edit_json(folder / "tokenizer_config.json", chat_template=FOLDED_SYSTEM)
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    parts = {"role": "user", "content": [{"type": "text", "text": " And now? "}]}
    chat = [*system, USER, {"role": "assistant", "content": " Yes.\n"}, parts]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(chat).endswith("And now?</turn>\n<turn>model\n")
    with pytest.raises(RequestError, match="turns must alternate"):
        ours.render_chat([USER, USER])


CONTINUED = ["It is", "It is ", "", " \n It is\n\n", [{"type": "text", "text": "It is "}, {"type": "image"}]]
MESSAGE_BODIES = {
    "as it is": "{{ text }} </end>",
    "trimmed": "{{ text | trim }}</end>",
    "trimmed, then a space": "{{ text | trim }} </end>",
}


@pytest.mark.parametrize("content", CONTINUED)
@pytest.mark.parametrize("body", MESSAGE_BODIES.values(), ids=MESSAGE_BODIES.keys())
def test_continued_message_equals_transformers(folder, body, content):
    text = "{% set text = m.content if m.content is string else m.content[0].text %}"
    template = "{% for m in messages %}" + text + "[{{ m.role }}] " + body + "\n{% endfor %}"
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    chat = [USER, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == expected
    assert "</end>" not in expected.partition("[assistant]")[2]
    assert chat[1]["content"] is content


def test_message_that_quotes_the_mark_of_the_end(small):
    chat = [{"role": "user", "content": f"What is {_END_MARK}for?"}, {"role": "assistant", "content": "It is"}]
    rendered = small.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == small.render_chat(chat, add_generation_prompt=False).removesuffix("<|im_end|>\n")


def test_continued_message_of_a_real_template(pair):
    ours, theirs = pair
    chat = [SYSTEM, USER, {"role": "assistant", "content": "It is "}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == expected
    assert expected.endswith("It is ")


@pytest.mark.parametrize(
    "message, problem",
    [
        ({"role": "assistant"}, "needs a last message with text"),
        ({"role": "assistant", "content": None}, "needs a last message with text"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "needs a last message with text"),
    ],
)
def test_nothing_to_continue(small, message, problem):
    with pytest.raises(RequestError, match=problem):
        small.render_chat([USER, message], add_generation_prompt=False, continue_final_message=True)


def test_continuing_what_the_template_leaves_out(small):
    tokenizer = Tokenizer(small.backend, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not render the last message unchanged"):
        tokenizer.render_chat([USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)


def test_continuing_and_opening_exclude_each_other(small):
    with pytest.raises(
        RequestError, match=r"continue_final_message=True cannot be combined with add_generation_prompt"
    ):
        small.render_chat([USER, ASSISTANT], continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        "{{ strftime_now('%Y-%m') }}",
        "{{ {'b': '<é&>', 'a': [1, none]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{% set x = 1 %}{{ m.role }}{% endgeneration %}{{ x is defined }}{% endfor %}",
        "  {% if true %}\n  yes\n  {% endif %}\n{%- set ns = namespace(n=0) %}{% set ns.n = 4 %}{{ ns.n }}\n",
        "{{ documents is none }} {{ tools is none }} {{ nothing is defined }} {{ nothing }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ 'abc'[1:] }}{{ messages[0]['content'].split(' ')[0] }}",
    ],
)
def test_template_language_is_that_of_transformers(folder, template):
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template([USER, ASSISTANT], tokenize=False)
    assert Tokenizer.from_dir(folder).render_chat([USER, ASSISTANT], add_generation_prompt=False) == theirs


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages[0].update(role='x') }}", "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", f"more than {MAX_RENDERED_CHARS} characters"),
        ("{% if %}", "cannot be compiled"),
        ("{{ 'a' | nofilter }}", "cannot be compiled"),
    ],
)
def test_template_errors_refuse_the_request(small, template, message):
    tokenizer = Tokenizer(small.backend, chat_template=template)
    with pytest.raises(RequestError, match=message):
        tokenizer.render_chat([dict(USER)])


def test_fixture_template_refuses_a_late_system_message(small):
    with pytest.raises(RequestError, match=r"The system message must be the first one\."):
        small.render_chat([USER, SYSTEM])


@pytest.mark.parametrize("messages", [[], (), None, "hi", {"role": "user"}, ["hi"], [USER, None]])
def test_messages_must_be_messages(small, messages):
    with pytest.raises(RequestError, match="messages must be a non-empty list of mappings"):
        small.render_chat(messages)


@pytest.mark.parametrize("tools", ["weather", [len], {"name": "f"}])
def test_tools_must_be_schemas(small, tools):
    with pytest.raises(RequestError, match="tools must be a list of mappings"):
        small.render_chat([USER], tools=tools)
