"""Chat templates: the golden cases, transformers' rendering, published templates, and OpenAI-shaped messages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.hub import ModelError, files_of_folder, files_of_gguf, resolve
from headstart.text import ChatTemplate, TemplateError, Tokenizer
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.stories import SHARED_DATA, make_stories_folder, shared_data
from tests.fixtures.tiny_vocab import byte_level_metadata, byte_level_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = sorted((SHARED_DATA / "golden" / "llama.cpp-templates").glob("*.jinja"))
# These are written for calls with tools only: without any, they fail (in transformers too).
NEED_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}
USER = {"role": "user", "content": "Hello <b>& you</b>"}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "名"}}},
    },
}


def template_of(source: str, **more: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **more}, SPECIAL)


def golden() -> list[dict[str, Any]]:
    path = SHARED_DATA / "golden" / "chat_template_cases.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []


@pytest.mark.parametrize("case", golden(), ids=lambda case: case["name"])
def test_golden_case(case: dict[str, Any]) -> None:
    whole = json.loads(shared_data("golden", "chat_template_cases.json").read_text(encoding="utf-8"))
    template = ChatTemplate({"default": case["template"]}, {"bos_token": case["bos"], "eos_token": case["eos"]})
    text = template.render(whole["messages"], add_generation_prompt=whole["add_generation_prompt"])
    assert text == case["expected"]


def test_there_are_as_many_cases_and_templates_as_the_data_promises() -> None:
    shared_data("golden")
    assert (len(golden()), len(TEMPLATES)) == (24, 70)


def reference(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """transformers' rendering."""
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, tools=tools, add_generation_prompt=True, **SPECIAL
    )
    return str(rendered[0])


@cache
def published(path: Path) -> ChatTemplate:
    return template_of(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", TEMPLATES[::4], ids=lambda path: path.stem)
def test_a_published_template_renders_as_in_transformers(path: Path) -> None:
    for messages, tools in (([USER], None), (TURNS, None), ([USER], [WEATHER])):
        try:
            expected = reference(path.read_text(encoding="utf-8"), messages, tools)
        except Exception:
            with pytest.raises(TemplateError, match="refuses these messages"):
                published(path).render(messages, tools=tools)
        else:
            assert published(path).render(messages, tools=tools) == expected
            assert messages[-1]["content"] in expected


def test_every_published_template_renders_but_for_those_that_need_tools() -> None:
    shared_data("golden", "llama.cpp-templates")
    failed = set()
    for path in TEMPLATES:
        try:
            assert USER["content"] in published(path).render([USER])
        except TemplateError:
            failed.add(path.stem)
    assert failed == NEED_TOOLS


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}={{ m.content }}"
    "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_parts_are_joined_where_the_template_prints_a_string() -> None:
    assert template_of(ROLES).render(parts("a", "b")) == "[user]a\nb"


def test_parts_stay_parts_where_the_template_walks_them() -> None:
    assert template_of(EITHER).render(parts("a", "b")) == "<a><b>"
    assert template_of(EITHER).render([{"role": "user", "content": "a"}]) == "=a"


def test_a_string_becomes_a_part_where_the_template_knows_only_parts() -> None:
    assert template_of(PARTS).render([{"role": "user", "content": "ab"}]) == "<ab>"


def test_llama_3_takes_parts_as_text() -> None:
    source = shared_data("golden", "llama.cpp-templates", "meta-llama-Llama-3.1-8B-Instruct.jinja").read_text()
    text = template_of(source).render(parts("Hello", "you"))
    assert "Hello\nyou<|eot_id|>" in text
    assert "'type'" not in text


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, {"type": "text", "text": 1}, 7]
)
def test_other_parts_are_refused_by_place_and_type(part: Any) -> None:
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content\[0\] is of type .*text parts only"):
        template_of(ROLES).render([{"role": "user", "content": [part]}])


def test_null_content_is_empty_and_tool_arguments_are_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "<Köln>"}'}}
    source = "{{ messages[0].content }}|{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert template_of(source).render([message]) == '|{"city": "<Köln>"}'
    assert message["content"] is None  # the caller's own message is left alone
    broken = {**message, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}, "x"]}
    assert template_of("{{ messages[0].tool_calls[0].function.arguments }}").render([broken]) == "{"


def test_tools_choose_the_template_that_is_made_for_them() -> None:
    template = template_of("plain", tool_use="with {{ tools | length }}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=[WEATHER]) == "with 1"


def test_the_variables_that_templates_expect() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ documents }}{{ add_generation_prompt }}"
    text = template_of(source).render([USER], add_generation_prompt=False, enable_thinking=False)
    assert text == "<s></s>FalseNoneFalse"
    hostile = {"messages": [], "self": 1, "range": 2, "bos_token": "x"}
    assert template_of("{{ messages | length }}{{ range(2) | list }}").render([USER], **hostile) == "1[0, 1]"


def test_a_refusal_by_the_template_comes_through_in_its_own_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must\n alternate') }}{% endif %}ok"
    assert template_of(source).render([USER]) == "ok"
    with pytest.raises(TemplateError, match="refuses these messages: roles must alternate"):
        template_of(source).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ none.x.y }}", "{{ messages['a']['b']['c'] }}", "{{ 'a' + 1 }}"])
def test_whatever_a_template_raises_is_the_same_kind_of_error(source: str) -> None:
    with pytest.raises(TemplateError, match="refuses these messages"):
        template_of(source).render([USER])


def test_a_model_without_a_template_cannot_chat() -> None:
    template = ChatTemplate({}, {}, name="mine")
    assert not template.exists
    with pytest.raises(TemplateError, match="mine has no chat template: use /v1/completions"):
        template.render([USER])


def test_a_template_that_does_not_compile_is_a_damaged_model() -> None:
    with pytest.raises(ModelError, match="mine: chat template 'default' is damaged, line 2") as error:
        ChatTemplate({"default": "\n{% for %}"}, {}, name="mine")
    assert "\n" not in str(error.value)


def test_a_folders_template_and_its_special_tokens(tmp_path: Path) -> None:
    files = files_of_folder(make_stories_folder(tmp_path))
    tokenizer = Tokenizer.load(files)
    template = ChatTemplate.load(files, tokenizer)
    assert template.exists
    assert template.render([{"role": "user", "content": "Hi"}]) == "<s>user: Hi\nassistant:"
    ids = tokenizer.encode(template.render([{"role": "user", "content": "Hi"}]), add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id


def test_where_a_folders_template_may_lie(tmp_path: Path) -> None:
    folder = make_stories_folder(tmp_path)
    tokenizer = Tokenizer.load(files_of_folder(folder))

    def rendered(**config: object) -> str:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        template = ChatTemplate.load(files_of_folder(folder), tokenizer)
        return template.render([USER], tools=[WEATHER])

    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": 1}, "x"]
    assert rendered(chat_template="a") == "a"
    assert rendered(chat_template=named) == "b"
    with pytest.raises(TemplateError, match="has no chat template"):
        rendered()
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert rendered(chat_template="a") == "file"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"cannot read .*chat_template\.jinja"):
        rendered()


def test_templates_in_a_gguf_file(tmp_path: Path) -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "{{ bos_token }}plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    files = files_of_gguf(write_gguf(tmp_path / "m.gguf", metadata))
    template = ChatTemplate.load(files, byte_level_tokenizer())
    assert template.render([USER]) == "<|im_start|>plain"
    assert template.render([USER], tools=[WEATHER]) == "tools"


@pytest.mark.model
def test_the_default_models_template() -> None:
    files = resolve("smollm2-135m")
    template = ChatTemplate.load(files, Tokenizer.load(files))
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
