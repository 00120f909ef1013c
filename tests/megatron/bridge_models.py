"""The script that `bridge_run` runs for kinds of models; see `bridge_script`."""

if __name__ == "__main__":
    from tests.megatron.bridge_models_ranks import main

    main()
