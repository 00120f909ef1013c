"""The script that `bridge_run` runs; a process that Bridge starts to save a checkpoint imports it too."""

if __name__ == "__main__":
    from tests.megatron.bridge_ranks import main

    main()
