/* NVIDIA's driver as far as fleetrun asks it: libnvidia-ml below the real pynvml, and libcuda's start.
 *
 * FAKE_GPUS=N has N GPUs, the one of number FAKE_BARRED not for us; FAKE_HOLDERS processes compute on
 * the first; FAKE_LOAD is a file with "kernels memory" in percent, of all of them; FAKE_STUCK=FILE:
 * NVML makes that file and never answers; FAKE_CUDA=CODE is what cuInit ends with. What is not here,
 * pynvml raises FunctionNotFound for. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INVALID 2
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define TOO_SMALL 7

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;

static long gpus(void) { return atol(getenv("FAKE_GPUS") ? getenv("FAKE_GPUS") : "1"); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *asked = getenv("FAKE_STUCK");
    if (!asked) return 0;
    close(creat(asked, 0600));
    for (;;) pause();
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
    if (code == NO_PERMISSION) return "Insufficient Permissions";
    return code == INVALID ? "Invalid Argument" : "Not Supported";
}
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "550.54.14");
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpus(); return 0; }
/* A handle is the number of the GPU, from 1. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(index + 1L);
    if (getenv("FAKE_BARRED") && index == atoi(getenv("FAKE_BARRED"))) return NO_PERMISSION;
    return index < gpus() ? 0 : INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    return strncmp(uuid, "GPU-", 4) ? INVALID : nvmlDeviceGetHandleByIndex_v2(atoi(uuid + 4), handle);
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%ld", (long)handle - 1);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    (void)handle;
    snprintf(name, size, "Fake H100");
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9, *minor = 0;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    (void)handle;
    *count = 7; /* It could be divided, and is not. */
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **part) {
    (void)handle, (void)index, (void)part;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    (void)handle;
    *now = *pending = 0;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    (void)handle;
    memory->total = 80ULL << 30, memory->used = 1ULL << 30, memory->free = 79ULL << 30;
    return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned instance, part; } Process;

/* Holders have pids that no process can have, from 5000000 on. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    unsigned holders = getenv("FAKE_HOLDERS") && handle == (void *)1 ? atoi(getenv("FAKE_HOLDERS")) : 0;
    unsigned room = *count;
    *count = holders;
    if (room < holders) return TOO_SMALL;
    for (unsigned at = 0; at < holders; ++at) processes[at].pid = 5000000 + at;
    return 0;
}
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    snprintf(pci->address, sizeof pci->address, "00000000:%02lX:00.0", (long)handle);
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    (void)handle;
    FILE *file = fopen(getenv("FAKE_LOAD") ? getenv("FAKE_LOAD") : "", "r");
    if (!file) return NOT_SUPPORTED;
    int count = fscanf(file, "%u %u", &rates->gpu, &rates->memory);
    fclose(file);
    return count == 2 ? 0 : NOT_SUPPORTED;
}

int cuInit(unsigned flags) { (void)flags; return getenv("FAKE_CUDA") ? atoi(getenv("FAKE_CUDA")) : 0; }
int cuDeviceGetCount(int *count) {
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    *count = gpus();
    if (mask) {
        *count = *mask != 0;
        for (; *mask; mask++) *count += *mask == ',';
    }
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    return 0;
}
