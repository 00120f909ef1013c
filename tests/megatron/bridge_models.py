"""The script that `bridge_models_run` runs; see `bridge_script`."""

if __name__ == "__main__":
    from tests.megatron.bridge_models_ranks import main

    main()
