"""Running models of transformers: hooks on their modules, statistics over text, and layers fitted one by one."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"tnlib_adapters.instrument needs torch and transformers, found no {missing.name}; pip install 'tnlib[torch]'.",
        name=missing.name,
    ) from None
