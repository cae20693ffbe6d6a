"""The variables of clusters in tests."""

from __future__ import annotations

# As srun --nodes=2 sets them in Slurm 22.05.
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# As sbatch --nodes=4 sets them for its script.
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_TASKS_PER_NODE": "8(x4)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
