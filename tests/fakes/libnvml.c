// SPDX-License-Identifier: Apache-2.0
// NVML without a GPU: one GPU by its UUID, whose free bytes stand in the file FAKE_NVML_FREE names.
// Without that variable nothing can be initialised, as where the driver has gone.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
static int ready;

int nvmlInit_v2(void) { ready = getenv("FAKE_NVML_FREE") != NULL; return ready ? 0 : 9; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &ready;
    return !ready ? 1 : strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    FILE *file = fopen(getenv("FAKE_NVML_FREE"), "r");
    if (device != &ready || !file || fscanf(file, "%llu", &memory->free) != 1) return 2;
    fclose(file);
    return 0;
}
const char *nvmlErrorString(int result) { return result == 9 ? "Driver Not Loaded" : result == 6 ? "Not Found" : "Fault"; }
