// What cuda_ipc asks of a driver, answered with memory that processes share by its owner's descriptor: the handle
// exchange and every byte are real, the card is not. What a stream is given to bring is done as late as it may be: when somebody waits.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char reserved[64]; } Handle;
typedef struct { uint64_t at; size_t size; int fd; } Known;  // fd: of memory that is our own, else -1

static Known known[4096];
static int count, refused;

static Known* find(uint64_t at) {
  for (int i = 0; i < count; i++)
    if (known[i].at == at) return &known[i];
  return NULL;
}

static int map(int fd, int ours, uint64_t* at) {
  if (fd < 0) return 201;
  size_t size = lseek(fd, 0, SEEK_END);
  void* mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (!ours) close(fd);
  if (mapped == MAP_FAILED || count == 4096) return 2;
  *at = (uint64_t)mapped;
  known[count++] = (Known){*at, size, ours ? fd : -1};
  return 0;
}

int cuInit(unsigned flags) { return getenv("STAND_IN_NO_CARD") ? 100 : 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
// As an H100 that has a driver for CUDA 13.
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "no GPU at all") < 0; }
int cuDeviceTotalMem_v2(size_t* size, int device) { *size = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) { memset(uuid, 7, 16); return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = known; return 0; }
int cuCtxSetCurrent(void* context) { return context != known; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t* at, size_t size) {
  int fd = memfd_create("baton-stand-in", MFD_CLOEXEC);  // gone with its last user, however that ends
  return fd < 0 || ftruncate(fd, size) ? 2 : map(fd, 1, at);
}
static int drop(uint64_t at, int ours) {
  Known* one = find(at);
  if (!one || (one->fd >= 0) != ours) return 1;
  munmap((void*)one->at, one->size);
  if (ours) close(one->fd);
  *one = known[--count];
  return 0;
}
int cuMemFree_v2(uint64_t at) { return drop(at, 1); }
int cuIpcCloseMemHandle(uint64_t at) { return drop(at, 0); }
int cuIpcGetMemHandle(Handle* handle, uint64_t at) {
  Known* one = find(at);
  if (!one || one->fd < 0) return 1;
  snprintf(handle->reserved, 64, "/proc/%d/fd/%d", getpid(), one->fd);
  return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* at, Handle handle, unsigned flags) {
  handle.reserved[63] = 0;
  return map(open(handle.reserved, O_RDWR | O_CLOEXEC), 0, at);
}
static int inside(uint64_t at, size_t size) {
  for (int i = 0; i < count; i++)
    if (at >= known[i].at && at + size <= known[i].at + known[i].size) return 1;
  return refused++, 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) {
  return inside(to, size) ? (memcpy((void*)to, from, size), 0) : 1;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
  return inside(from, size) ? (memcpy(to, (void*)from, size), 0) : 1;
}
typedef struct { char* to; uint64_t from; size_t size; } Late;
static Late late[65536];
static int waiting, unpinnable;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cuStreamCreate(void** stream, unsigned flags) { *stream = late; return flags != 1; }
int cuEventCreate(void** event, unsigned flags) { *event = late; return flags != 3; }
int cuEventRecord(void* event, void* stream) { return event != late || stream != late; }
int cuStreamSynchronize(void* stream) {
  pthread_mutex_lock(&lock);
  int wrong = stream != late;
  for (int i = 0; i < waiting; i++)
    if (!inside(late[i].from, late[i].size)) wrong = 1;
    else memcpy(late[i].to, (void*)late[i].from, late[i].size);
  waiting = 0;
  pthread_mutex_unlock(&lock);
  return wrong;
}
int cuEventSynchronize(void* event) { return cuStreamSynchronize(event); }
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream) {
  pthread_mutex_lock(&lock);
  int wrong = stream != late || waiting == 65536;
  if (!wrong) late[waiting++] = (Late){to, from, size};
  pthread_mutex_unlock(&lock);
  return wrong;
}
int cuMemHostAlloc(void** at, size_t size, unsigned flags) { return flags != 3 || !(*at = malloc(size)); }
int cuMemFreeHost(void* at) { free(at); return 0; }
int cuMemHostRegister_v2(void* at, size_t size, unsigned flags) { return unpinnable ? 712 : flags != 1; }
void stand_in_cannot_pin(int yes) { unpinnable = yes; }
int stand_in_waiting(void) { return waiting; }
int cuGetErrorString(int error, const char** text) {
  *text = error == 100 ? "no CUDA-capable device is detected" : "invalid argument";
  return 0;
}
int stand_in_known(void) { return count; }
