"""The programs in this folder run in the environment of `make peers`, started by tests/test_drop_in_tf_agents.py."""

collect_ignore_glob = ["*.py"]
