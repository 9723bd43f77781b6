// SPDX-License-Identifier: Apache-2.0
// NVML without a GPU: it counts its users, as the real one does.
static int users;
int nvmlInit(void) { users++; return 0; }
int nvmlShutdown(void) { return users == 0 ? 1 : (users--, 0); }
