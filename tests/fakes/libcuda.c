// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: memory is memfds, device addresses are this process's own. It refuses
// what the real one refuses (sizes off the granularity, ranges that are mapped or not reserved), so
// that tests find it. Faults are asked for through the environment; FULL is how many allocations find
// room, COPY what becomes of a copy to or from the host. NO_CHECKPOINT leaves out what
// came with driver 570; a state file stands for the process that is checkpointed.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401, BUSY = 719, NOT_SUPPORTED = 801 };
enum { GRANULARITY = 1 << 21, MAX = 1024 };
typedef struct { int kind, id; } Location;
typedef struct { int kind, handles; Location where; void *windows; unsigned char flags[8]; } Properties;
typedef struct { Location where; int rights; } Access;
static struct { uint64_t address; size_t size; int mapped; } ranges[MAX];
static int handles_open, made, ready, contexts[8];
static _Thread_local int current;
static size_t stack = 1024;

static const char *fault(const char *name) { return getenv(name); }
static int range(uint64_t address, size_t size) {
    for (int i = 0; i < MAX; i++)
        if (ranges[i].size == size && ranges[i].address == address) return i;
    return -1;
}
static int off(size_t size) { return size == 0 || size % GRANULARITY; }

static int hidden(void) {
    const char *wish = fault("CUDA_VISIBLE_DEVICES");
    return wish && !strncmp(wish, "GPU-", 4) && strcmp(wish, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
}
int cuInit(unsigned flags) { ready = flags == 0; return fault("FAKE_CUDA_ABSENT") || hidden() ? 100 : fault("FAKE_CUDA_BROKEN") ? INVALID : 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
static int devices(void) { return fault("FAKE_CUDA_COUNT") ? atoi(fault("FAKE_CUDA_COUNT")) : 1; }
int cuDeviceGetCount(int *count) { *count = devices(); return ready ? 0 : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return !ready ? NOT_INITIALIZED : ordinal >= devices() ? 101 : 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "%s", fault("FAKE_CUDA_NAME") ? fault("FAKE_CUDA_NAME") : "NVIDIA H200");
    return device < devices() ? 0 : INVALID;
}
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)141 << 30; return device < devices() ? 0 : INVALID; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return device < devices() ? 0 : INVALID; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return fault("FAKE_CUDA_NO_CONTEXT") ? OUT_OF_MEMORY : 0; }
int cuCtxSetCurrent(void *context) { current = context == &contexts[0]; return 0; }
int cuCtxGetLimit(size_t *size, int which) { *size = stack; return !current ? 201 : which ? INVALID : 0; }
int cuCtxSetLimit(int which, size_t size) {
    if (!current || which) return current ? INVALID : 201;
    stack = size;
    return 0;
}
int cuCtxSynchronize(void) { return current ? 0 : 201; }
int cuGetErrorName(int result, const char **name) {
    *name = result == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : result == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
          : result == INVALID ? "CUDA_ERROR_INVALID_VALUE" : result == ILLEGAL_STATE ? "CUDA_ERROR_ILLEGAL_STATE" : NULL;
    return *name ? 0 : INVALID;
}
int cuMemGetAllocationGranularity(size_t *size, const Properties *p, int option) {
    *size = GRANULARITY;
    return p->kind == 1 && p->handles == 1 && p->where.kind == 1 && option == 0 ? 0 : INVALID;
}
int cuMemCreate(uint64_t *handle, size_t size, const Properties *p, uint64_t flags) {
    if (off(size) || p->kind != 1 || p->handles != 1 || p->where.kind != 1 || flags) return INVALID;
    if (fault("FAKE_CUDA_FULL") && made++ >= atoi(fault("FAKE_CUDA_FULL"))) return OUT_OF_MEMORY;
    int fd = memfd_create("device", 0);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    handles_open++;
    *handle = fd;
    return 0;
}
int cuMemRelease(uint64_t handle) { handles_open--; return close(handle) ? INVALID : 0; }
int cuMemExportToShareableHandle(void *to, uint64_t handle, int kind, uint64_t flags) {
    *(int *)to = dup(handle);
    return kind == 1 && flags == 0 ? 0 : INVALID;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *from, int kind) {
    int fd = dup((int)(intptr_t)from);
    if (fd < 0 || kind != 1) return INVALID;
    handles_open++;
    *handle = fd;
    return 0;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wish, uint64_t flags) {
    int free = range(0, 0);
    if (off(size) || alignment || wish || flags || free < 0) return INVALID;
    void *place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ranges[free].address = *address = (uint64_t)place;
    ranges[free].size = size;
    return place == MAP_FAILED ? OUT_OF_MEMORY : 0;
}
int cuMemAddressFree(uint64_t address, size_t size) {
    int i = range(address, size);
    if (i < 0 || ranges[i].mapped || munmap((void *)address, size)) return INVALID;
    memset(&ranges[i], 0, sizeof ranges[i]);
    return 0;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    int i = range(address, size);
    struct stat status;
    if (i < 0 || ranges[i].mapped || offset || flags || fstat(handle, &status) || (size_t)status.st_size != size) return INVALID;
    // The kernel's MAP_SHARED keeps the memory, as a mapping does on a device.
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0) == MAP_FAILED) return INVALID;
    ranges[i].mapped = 1;
    return 0;
}
int cuMemUnmap(uint64_t address, size_t size) {
    int i = range(address, size);
    if (i < 0 || !ranges[i].mapped) return INVALID;
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    ranges[i].mapped = 0;
    return 0;
}
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    int i = range(address, size);
    if (i < 0 || !ranges[i].mapped || count != 1 || access->where.kind != 1) return INVALID;
    if (access->rights == 1 && fault("FAKE_CUDA_NO_READ_ONLY")) return NOT_SUPPORTED;
    if (fault("FAKE_CUDA_NO_ACCESS")) return BUSY;
    return mprotect((void *)address, size, access->rights == 3 ? PROT_READ | PROT_WRITE : PROT_READ) ? INVALID : 0;
}
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
    memcpy((void *)to, (void *)from, size);
    return current ? 0 : 201;
}
static int copy(void *to, const void *from, size_t size) {
    const char *fate = fault("FAKE_CUDA_COPY");
    if (fate && !strcmp(fate, "killed")) raise(SIGKILL);
    while (fate && !strcmp(fate, "hangs")) pause();
    if (current) memcpy(to, from, size);
    return current ? 0 : 201;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { return copy(to, (void *)from, size); }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { return copy((void *)to, from, size); }
int fake_open_handles(void) { return handles_open; }

#ifndef NO_CHECKPOINT
// The state file holds a state's number; without one the process has no CUDA.
static int read_state(void) {
    int state = -1;
    FILE *file = fopen(getenv("FAKE_CUDA_STATE"), "r");
    if (file == NULL) return -1;
    if (fscanf(file, "%d", &state) != 1) state = -1;
    fclose(file);
    return state;
}
static int go(int from, int to) {
    const char *slow = fault("FAKE_CUDA_SLOW");
    if (slow) usleep(1000 * atoi(slow));
    int state = read_state();
    if (state < 0) return NOT_INITIALIZED;
    if (state != from) return ILLEGAL_STATE;
    FILE *file = fopen(getenv("FAKE_CUDA_STATE"), "w");
    fprintf(file, "%d", to);
    return fclose(file);
}
int cuCheckpointProcessGetState(int pid, int *state) { *state = read_state(); return pid != 42 || *state < 0 ? NOT_INITIALIZED : 0; }
int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) { *tid = pid + 7; return read_state() < 0 ? NOT_INITIALIZED : 0; }
int cuCheckpointProcessLock(int pid, const unsigned *arguments) {
    dprintf(1, "%d %u\n", pid, arguments[0]);  // the limit in ms
    for (int i = 1; i < 16; i++)
        if (arguments[i]) return INVALID;
    return go(0, 1);
}
int cuCheckpointProcessCheckpoint(int pid, const uint64_t *arguments) {
    for (int i = 0; i < 8; i++)
        if (arguments[i]) return INVALID;
    return pid == 42 ? go(1, 2) : INVALID;
}
int cuCheckpointProcessRestore(int pid, const void *arguments) { return pid == 42 && !arguments ? go(2, 1) : INVALID; }
int cuCheckpointProcessUnlock(int pid, const uint64_t *arguments) {
    for (int i = 0; i < 8; i++)
        if (arguments[i]) return INVALID;
    return pid == 42 ? go(1, 0) : INVALID;
}
#endif
