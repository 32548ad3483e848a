"""Print a script with which a shell completes the command.

These lines go to ~/.bashrc, to ~/.zshrc below compinit, or to ~/.config/fish/config.fish:

    eval "$(symmplan completion bash)"
    eval "$(symmplan completion zsh)"
    symmplan completion fish | source
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from symmplan.cli.mistakes import long_options

__all__ = ["add_arguments", "run"]

# In zsh bashcompinit runs the same function.
_BASH = """\
_symmplan() {{
    local words=""
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
    if [ "$COMP_CWORD" -eq 2 ] && [ "${{COMP_WORDS[1]}}" = bench ]; then words="{benches}"; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _symmplan symmplan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``symmplan completion``."""
    shells = ("bash", "zsh", "fish")
    parser.add_argument("shell", metavar="SHELL", choices=shells, help=", ".join(shells))


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Print the script as it is, whatever the terminal's width; with ``--json`` return it."""
    script = _fish() if args.shell == "fish" else _bash()
    if args.shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    if args.json:
        return {"ok": True, "shell": args.shell, "script": script}
    sys.stdout.write(script)
    return None


def _bash() -> str:
    from symmplan.cli.shell import COMMANDS, benches

    cases = [
        f'        "{command}{"" if " " in command else " "}"*) words="{" ".join(options)}" ;;'
        for command, options in _options().items()
    ]
    names = {"commands": " ".join(COMMANDS), "benches": " ".join(benches())}
    return _BASH.format(cases="\n".join(cases), **names)


def _fish() -> str:
    from symmplan.cli.shell import COMMANDS, benches

    begin, seen = "complete -c symmplan -n", "__fish_seen_subcommand_from"
    lines = [f'{begin} __fish_use_subcommand -f -a {c} -d "{t}"' for c, t in COMMANDS.items()]
    many = " ".join(benches())
    lines.append(f'{begin} "{seen} bench; and not {seen} {many}" -f -a "{many}"')
    for command, options in _options().items():
        within = "; and ".join(f"{seen} {word}" for word in command.split())
        lines += [f'{begin} "{within}" -l {option.removeprefix("--")}' for option in options]
    return "\n".join(lines) + "\n"


def _options() -> dict[str, list[str]]:
    """``{command: its long options}``, also of each benchmark."""
    from symmplan.cli import shell

    found = {}
    commands = [name for name in shell.COMMANDS if name != "bench"]
    for command in (*commands, *(f"bench {name}" for name in shell.benches())):
        parser = argparse.ArgumentParser()
        shell.load(command).add_arguments(parser)
        found[command] = [*long_options(parser), "--json", "--debug", "--help"]
    return found
