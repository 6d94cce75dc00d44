class CallWrapper:
    """Bridge's pretrain names it in a signature."""
