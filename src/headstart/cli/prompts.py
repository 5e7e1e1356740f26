"""A model's template and tokenizer as `headstart.prompt` wants them: for commands that read requests from files."""

from __future__ import annotations

from headstart.hub import Progress, resolve
from headstart.prompt.render import PromptMaker, plain_text
from headstart.prompt.request import PromptRequest, RequestError, as_json
from headstart.server.errors import ApiError
from headstart.server.messages import ChatPrompts
from headstart.text import ChatTemplate, Tokenizer


class ModelTemplate:
    """Renders requests as the server does; what this model's template has no form for, in a plain form, counted."""

    def __init__(self, template: ChatTemplate) -> None:
        self._prompts = ChatPrompts(template)
        self.num_plain = 0
        self.num_tools_apart = 0

    def __call__(self, request: PromptRequest) -> str:
        try:
            return self._render(request, request.tools)
        except ApiError as error:
            if error.param == "tools":
                self.num_tools_apart += 1
                return self._without_tools(request)
            return self._refused(request, error)

    def _without_tools(self, request: PromptRequest) -> str:
        """Most templates write the tools before the messages."""
        try:
            return f"{as_json(list(request.tools))}\n" + self._render(request, ())
        except ApiError as error:
            return self._refused(request, error)

    def _render(self, request: PromptRequest, tools: object) -> str:
        return self._prompts.render(
            [dict(message) for message in request.messages],
            tools=[dict(tool) for tool in request.tools] if tools else None,
            add_generation_prompt=True,
            extra=request.parameters,
        )

    def _refused(self, request: PromptRequest, error: ApiError) -> str:
        if error.code not in ("template_error", "no_chat_template"):
            raise RequestError(str(error))
        self.num_plain += 1
        return plain_text(request)

    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        notes = []
        if self.num_tools_apart:
            notes.append(f"{self.num_tools_apart} requests: this model's template knows no tools; counted in front")
        if self.num_plain:
            notes.append(f"{self.num_plain} requests: refused by this model's template; counted in a plain form")
        return notes


def load_prompt_maker(model: str, progress: Progress) -> tuple[PromptMaker, ModelTemplate]:
    """The text side of a model; its weights are not read. Raises `ModelError`."""
    files = resolve(model, progress=progress)
    tokenizer = Tokenizer.load(files)
    template = ModelTemplate(ChatTemplate.load(files, tokenizer))

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except ValueError as error:
            raise RequestError(str(error)) from None

    return PromptMaker(template, encode, sorted(tokenizer.control_tokens)), template
