/* Makes the n-th change of files below a directory fail, tear, kill or wait. Loaded with LD_PRELOAD; see faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { COUNT, ERROR, FULL, TORN, LATE, DELAYED };

static char root[PATH_MAX];
static long target, seen;
static enum mode armed;
static int full;
#define WRITES (1 << 14)
static char writes[WRITES]; /* whether the n-th change is a write */

void faults_arm(const char *directory, long n, int mode) {
    strncpy(root, directory, sizeof root - 1);
    target = n, seen = 0, full = 0, armed = mode;
}

long faults_seen(void) { return seen; }
int faults_is_write(long n) { return n < WRITES && writes[n]; }

static int within(const char *path) { return root[0] && path && !strncmp(path, root, strlen(root)); }

static int of_handle(int handle) {
    char link[64], path[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = root[0] ? readlink(link, path, sizeof path - 1) : -1;
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return within(path);
}

/* A write that the disk has not got yet. It gets it when the file is flushed; otherwise it is lost, as in a power cut. */
static struct { int is_held; dev_t device; ino_t inode; off64_t place; size_t size; void *data; } held;

static ssize_t hold(int handle, const void *data, size_t size, off64_t place) {
    struct stat file;
    int at_offset = place < 0;
    if (at_offset && (place = lseek64(handle, 0, SEEK_CUR)) < 0) return -1;
    if (fstat(handle, &file) || !(held.data = malloc(size))) return -1;
    memcpy(held.data, data, size);
    held.is_held = 1, held.device = file.st_dev, held.inode = file.st_ino, held.place = place, held.size = size;
    if (at_offset) lseek64(handle, (off64_t)size, SEEK_CUR);
    return (ssize_t)size;
}

static void release(int handle) {
    struct stat file;
    char link[64];
    if (!held.is_held || fstat(handle, &file) || file.st_dev != held.device || file.st_ino != held.inode) return;
    held.is_held = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle); /* the handle itself may be for reading only */
    int writable = open(link, O_WRONLY);
    if (writable >= 0) {
        (void)!((__typeof__(&pwrite64))dlsym(RTLD_NEXT, "pwrite64"))(writable, held.data, held.size, held.place);
        close(writable);
    }
}

static void die(void) { kill(getpid(), SIGKILL); }

/* Returns whether this change is the one to spoil. */
static int hit(int counted) { return counted && __sync_add_and_fetch(&seen, 1) == target && armed != COUNT; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A change without bytes: fails, or the process dies before or after it. */
#define CHANGE(counted, call)                                  \
    do {                                                       \
        if (!hit(counted) || armed == DELAYED) return call;    \
        if (armed == TORN) die();                              \
        if (armed == LATE) { call; die(); }                    \
        errno = armed == FULL ? ENOSPC : EIO;                  \
        return -1;                                             \
    } while (0)

/* A write: half of it is done, unless it is an error of the device. */
#define WRITE(handle, size, whole, half, later)                \
    do {                                                       \
        int ours = of_handle(handle);                          \
        if (ours && seen + 1 < WRITES) writes[seen + 1] = 1;   \
        if (ours && full) { errno = ENOSPC; return -1; }       \
        if (!hit(ours)) return whole;                          \
        if (armed == DELAYED) return later;                    \
        if (armed == ERROR) { errno = EIO; return -1; }        \
        if (armed == LATE) { (void)!whole; die(); }            \
        if (armed == TORN) { (void)!half; die(); }             \
        full = 1;                                              \
        if ((size) < 2) { errno = ENOSPC; return -1; }         \
        return half;                                           \
    } while (0)

ssize_t write(int handle, const void *data, size_t size) {
    WRITE(handle, size, REAL(write)(handle, data, size), REAL(write)(handle, data, size / 2),
          hold(handle, data, size, -1));
}
ssize_t pwrite64(int handle, const void *data, size_t size, off64_t place) {
    WRITE(handle, size, REAL(pwrite64)(handle, data, size, place), REAL(pwrite64)(handle, data, size / 2, place),
          hold(handle, data, size, place));
}
ssize_t writev(int handle, const struct iovec *parts, int n) {
    WRITE(handle, n, REAL(writev)(handle, parts, n), REAL(writev)(handle, parts, n / 2),
          REAL(writev)(handle, parts, n));
}
int fsync(int handle) {
    release(handle);
    CHANGE(of_handle(handle), REAL(fsync)(handle));
}
int fdatasync(int handle) {
    release(handle);
    CHANGE(of_handle(handle), REAL(fdatasync)(handle));
}
int ftruncate64(int handle, off64_t size) { CHANGE(of_handle(handle), REAL(ftruncate64)(handle, size)); }
int rename(const char *from, const char *to) { CHANGE(within(to), REAL(rename)(from, to)); }
int renameat(int a, const char *from, int b, const char *to) { CHANGE(within(to), REAL(renameat)(a, from, b, to)); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    CHANGE(within(to), REAL(renameat2)(a, from, b, to, flags));
}
int link(const char *from, const char *to) { CHANGE(within(to), REAL(link)(from, to)); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    CHANGE(within(to), REAL(linkat)(a, from, b, to, flags));
}
int mkdir(const char *path, mode_t mode) { CHANGE(within(path), REAL(mkdir)(path, mode)); }
int unlink(const char *path) { CHANGE(within(path), REAL(unlink)(path)); }
