# SPDX-License-Identifier: Apache-2.0
"""`python -m arctic_rl_c`: the main job, and what this machine has."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import arctic_rl_c

_INTERRUPTED = 130  # what a shell gives for SIGINT
_BROKEN_PIPE = 141  # and for SIGPIPE

#: Extras of the package that a command needs.
_EXTRAS = {"smoke": "local", "serve": "local,http"}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any: not those of switches, nor None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m arctic_rl_c", description=arctic_rl_c.__doc__)
    parser.add_argument("--version", action="version", version=arctic_rl_c.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what was found on this machine")
    doctor.set_defaults(run=_doctor)
    smoke = commands.add_parser(
        "smoke",
        help="GRPO steps end to end on this machine",
        description="Train and sample a small model in two processes for some GRPO steps. Exit "
        "status 0 only if all steps ran, all numbers are finite and the sampler's weights "
        "equalled the trainer's after every sync.",
        formatter_class=_HelpFormatter,
    )
    smoke.set_defaults(run=_smoke)
    add = smoke.add_argument
    add("--steps", type=_positive, default=4, help="GRPO steps")
    add("--model", metavar="PATH", help="a local Hugging Face model; default: a random --shape")
    add("--shape", default="tiny", help="shape of the random model: micro, tiny or qwen3-0.6b")
    add("--generation", choices=("flat", "nested"), default="nested", help="form of the config")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add(
        "--transport",
        choices=("auto", "host_shm", "cuda_ipc", "ring", "nccl"),
        default="auto",
        help="how weights go from trainer to sampler",
    )
    add("--seed", type=int, default=0, help="of weights, problems and samples")
    add("--prompts", type=_positive, default=128, help="problems a step")
    add("--samples", type=_positive, default=16, help="responses of each problem")
    add("--lr", type=float, help="learning rate; default: 4e-3 for the small shapes, else 1e-5")
    add("--largest", type=_positive, default=4, help="largest number in a sum")
    add("--response-length", type=_positive, default=4, help="most tokens of a response")
    add("--json", metavar="PATH", help="write all numbers of the run")
    add("--plot", metavar="PATH", help="draw the score (needs matplotlib)")
    add("--traceback", action="store_true", help="show where an error came from")
    serve = commands.add_parser(
        "serve",
        help="the embedded server over HTTP",
        description="Serve a trainer and a sampler over HTTP until interrupted. There is no "
        "authentication: keep it on the loopback address, or on a network that you trust.",
        formatter_class=_HelpFormatter,
    )
    serve.set_defaults(run=_serve)
    add = serve.add_argument
    add("--config", metavar="FILE", help="a YAML main config to serve; default: a random --shape")
    add("--model", metavar="PATH", help="a local Hugging Face model")
    add("--shape", default="tiny", help="shape of the random model: micro, tiny or qwen3-0.6b")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=7000, help="0 picks a free one")
    add("--open", action="store_true", help="allow a --host that other machines reach")
    add("--traceback", action="store_true", help="show where an error came from")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        if sys.stdout is not None:  # it is where the caller closed it
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # of `| head`; what is still buffered goes nowhere, in silence
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except ImportError as error:
        hint = ""
        if options.command in _EXTRAS and "pip install" not in str(error):
            hint = (
                f"\n{options.command} needs more than the core package: "
                f"pip install 'arctic_rl_c[{_EXTRAS[options.command]}]'"
            )
        print(f"error: {error}{hint}", file=sys.stderr)
        return 1
    except Exception as error:
        if getattr(options, "traceback", False):
            traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, found {text!r}") from None


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {number}")
    return number


def _port(text: str) -> int:
    number = _whole(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, found {number}")
    return number


def _smoke(options: argparse.Namespace) -> int:
    from arctic_rl_c.local.smoke import SmokeOptions, run_smoke

    values = vars(options)
    run_smoke(SmokeOptions(**{name: values[name] for name in SmokeOptions.__dataclass_fields__}))
    return 0


def _serve(options: argparse.Namespace) -> int:
    from arctic_rl_c.local.serve import ServeOptions, run_serve

    values = vars(options)
    fields = {name: values[name] for name in ServeOptions.__dataclass_fields__}
    run_serve(ServeOptions(**fields), lambda line: print(line, flush=True))
    return 0


def _doctor(_: argparse.Namespace) -> int:
    arctic_rl_c.show_config()
    return 0
