#!/bin/sh
# Debian's Slurm and munge, for tests/slurm; needs root. Their services are not started.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends slurmctld slurmd slurm-client munge
