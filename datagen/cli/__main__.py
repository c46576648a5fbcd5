"""`python -m datagen.cli`."""

from datagen.cli import main

if __name__ == "__main__":  # processes that decode import this module again
    main()
