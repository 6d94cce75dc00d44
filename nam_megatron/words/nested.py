"""YAML as nodes. What is nested too deep would end the process in libyaml, which counts nothing."""

import yaml

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 500


def compose(text: str) -> yaml.Node | None:
    """The root of a document; None of an empty one. Raises yaml.YAMLError, also for more than DEEPEST levels."""
    if sum(map(text.count, "[{:-?")) > DEEPEST:  # what each level has at least one of
        depth = 0
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise yaml.YAMLError("nested too deep")
    return yaml.compose(text, Loader=Loader)
