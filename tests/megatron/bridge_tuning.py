"""The script of `tuning_ranks`, as `bridge_script` is that of `bridge_ranks`."""

if __name__ == "__main__":
    from tests.megatron.tuning_ranks import main

    main()
