"""`python -m pipelines.check`: does the pair fit together, does the run fit this machine, how long?

Looks at the pair (`models.compatibility`), then takes the dry run of what is to be made (`dry`): a
drafter that is trained and judged, or with `evaluate.draft=given` one that is judged as it is.
Exit code 0: it fits. 2: it does not, with the setting that helps.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from draftkit.config import Config
from draftkit.data.chats import chat_format
from draftkit.models.compatibility import NOTE, WRONG, Finding, findings, unknown_target
from draftkit.models.files import ModelFolder

from .command import run_command
from .dry import dry_run
from .plan import DISTILL, EVALUATE
from .product import Product, address_of_model, plan
from .stage import show_plan

LIMIT = 3  # batches of a stage, where `limit` gives none


def goal_of(config: Config) -> Product:
    """What is to be made."""
    return plan(EVALUATE if config.evaluate.draft == "given" else DISTILL, config)


def template_findings(config: Config) -> Iterator[Finding]:
    """What there is to say of the target's chat template. Raises ValueError as it is refused."""
    template = chat_format(ModelFolder(config.target).tokenizer, config.data, fixed_date=True)
    if template.has_template and (mark := template.text_mark()) is not None:
        text = f"turns begin with text that is no token, {mark!r}: a message can hold it as well"
        yield Finding(NOTE, "template", text)


def target_findings(config: Config) -> Iterator[Finding]:
    """What there is to say of a head and the target that it was made for."""
    if config.draft.path is not None:
        address = address_of_model(config.target, config.root)
        if text := unknown_target(config.draft, ModelFolder(config.draft).config, address):
            yield Finding(NOTE, "target", text)


def check(config: Config) -> None:
    """Print what there is to say. Raises ValueError for what does not fit."""
    wrong = []
    for one in chain(findings(config), target_findings(config), template_findings(config)):
        first = f"  {one.level:<5} {one.subject:<9} "
        print(textwrap.fill(one.text, 79, initial_indent=first, subsequent_indent=" " * len(first)))
        if one.level == WRONG:
            wrong.append(one.text)
    if wrong:
        raise ValueError("; ".join(wrong))
    goal = goal_of(replace(config, limit=None))
    if config.plan:
        show_plan("check", [goal])
        return
    dry_run("check", goal, config.limit or LIMIT)


if __name__ == "__main__":
    run_command("check", check)
