"""python -m nam_megatron COMMAND ...: the program `nam` where it is not on the PATH."""

from nam_megatron.cli import main

if __name__ == "__main__":
    main()
