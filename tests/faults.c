/* Lets the system fail at a chosen moment. `LD_PRELOAD` puts this library between a program and the C library on Linux.
 *
 *   FAULT_KIND  write: the disk is full from this call on. Writes to files, new files, new names, synchronisation.
 *               readonly: the same, but the file system is read-only.
 *               read: a file cannot be read. Once.
 *               memory: an allocation of at least FAULT_BYTES fails. Once.
 *               clock: from the start, the time of day goes backwards, and begins before 1970.
 *   FAULT_AT    at which of these calls of each process, counted from 1.
 *   FAULT_LOG   a file that gets a line for each process that met its fault: the process and the call.
 *
 * Calls that do not go through the C library's symbols (stdio's own writes, raw system calls) are not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

enum { NONE, WRITE, READ, MEMORY, CLOCK };

static int kind = NONE, why_not = ENOSPC, log_file = -1;
static long at = 0;
static size_t least = 1 << 20;
static atomic_long calls = 0;
static struct timespec start;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("FAULT_KIND"), *number = getenv("FAULT_AT"), *path = getenv("FAULT_LOG");
    const char *bytes = getenv("FAULT_BYTES");
    if (!name || !path) return;
    /* Before the program can give up the right to open it. */
    log_file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CLOEXEC);
    at = number ? atol(number) : 0;
    least = bytes ? (size_t)atol(bytes) : least;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &start);
    why_not = !strcmp(name, "readonly") ? EROFS : ENOSPC;
    kind = !strcmp(name, "write") || !strcmp(name, "readonly") ? WRITE : !strcmp(name, "read") ? READ : !strcmp(name, "memory") ? MEMORY
         : !strcmp(name, "clock") ? CLOCK : NONE;
}

/* Whether this call fails. */
static int fails(int of, const char *call) {
    if (kind != of) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (number == at) {
        char line[200];
        int length = snprintf(line, sizeof line, "%s %s\n", program_invocation_short_name, call);
        syscall(SYS_write, log_file, line, length);
    }
    return of == WRITE ? number >= at : number == at;
}

static int is_file(int fd) {
    struct stat status;
    struct statfs system;
    if (syscall(SYS_fstat, fd, &status) || !S_ISREG(status.st_mode)) return 0;
    if (syscall(SYS_fstatfs, fd, &system)) return 0;
    /* proc, sysfs, cgroup2 */
    return system.f_type != 0x9fa0 && system.f_type != 0x62656572 && system.f_type != 0x63677270;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FULL(call) if (kind == WRITE && fails(WRITE, call)) { errno = why_not; return -1; }
#define FULL_FILE(fd, call) if (kind == WRITE && is_file(fd) && fails(WRITE, call)) { errno = why_not; return -1; }
#define BROKEN(fd, call) if (kind == READ && is_file(fd) && fails(READ, call)) { errno = EIO; return -1; }

ssize_t write(int fd, const void *data, size_t n) { FULL_FILE(fd, "write") return NEXT(write)(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { FULL_FILE(fd, "writev") return NEXT(writev)(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t o) { FULL_FILE(fd, "pwrite") return NEXT(pwrite)(fd, d, n, o); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t o) {
    FULL_FILE(fd, "pwrite") return NEXT(pwrite64)(fd, d, n, o);
}
ssize_t copy_file_range(int in, off64_t *a, int out, off64_t *b, size_t n, unsigned f) {
    FULL_FILE(out, "copy_file_range") return NEXT(copy_file_range)(in, a, out, b, n, f);
}
ssize_t sendfile(int out, int in, off_t *o, size_t n) { FULL_FILE(out, "sendfile") return NEXT(sendfile)(out, in, o, n); }
ssize_t sendfile64(int out, int in, off64_t *o, size_t n) {
    FULL_FILE(out, "sendfile") return NEXT(sendfile64)(out, in, o, n);
}
int ftruncate(int fd, off_t n) { FULL_FILE(fd, "ftruncate") return NEXT(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { FULL_FILE(fd, "ftruncate") return NEXT(ftruncate64)(fd, n); }
int fallocate(int fd, int m, off_t o, off_t n) { FULL_FILE(fd, "fallocate") return NEXT(fallocate)(fd, m, o, n); }
int fallocate64(int fd, int m, off64_t o, off64_t n) { FULL_FILE(fd, "fallocate") return NEXT(fallocate64)(fd, m, o, n); }
int posix_fallocate(int fd, off_t o, off_t n) {
    if (kind == WRITE && is_file(fd) && fails(WRITE, "posix_fallocate")) return why_not;
    return NEXT(posix_fallocate)(fd, o, n);
}
int posix_fallocate64(int fd, off64_t o, off64_t n) {
    if (kind == WRITE && is_file(fd) && fails(WRITE, "posix_fallocate")) return why_not;
    return NEXT(posix_fallocate64)(fd, o, n);
}
int fsync(int fd) { FULL_FILE(fd, "fsync") return NEXT(fsync)(fd); }
int fdatasync(int fd) { FULL_FILE(fd, "fdatasync") return NEXT(fdatasync)(fd); }
int mkdir(const char *p, mode_t m) { FULL("mkdir") return NEXT(mkdir)(p, m); }
int mkdirat(int d, const char *p, mode_t m) { FULL("mkdir") return NEXT(mkdirat)(d, p, m); }
int link(const char *a, const char *b) { FULL("link") return NEXT(link)(a, b); }
int linkat(int d, const char *a, int e, const char *b, int f) { FULL("link") return NEXT(linkat)(d, a, e, b, f); }
int symlink(const char *a, const char *b) { FULL("symlink") return NEXT(symlink)(a, b); }
int rename(const char *a, const char *b) { FULL("rename") return NEXT(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { FULL("rename") return NEXT(renameat)(d, a, e, b); }

static mode_t mode_of(int flags, va_list rest) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}
/* The C library has one function under two names. */
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        if ((flags & O_CREAT) && access(path, F_OK)) { FULL("open") } \
        return NEXT(name)(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        if ((flags & O_CREAT) && faccessat(folder, path, F_OK, 0)) { FULL("open") } \
        return NEXT(name)(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t read(int fd, void *to, size_t n) { BROKEN(fd, "read") return NEXT(read)(fd, to, n); }
ssize_t readv(int fd, const struct iovec *v, int n) { BROKEN(fd, "readv") return NEXT(readv)(fd, v, n); }
ssize_t pread(int fd, void *to, size_t n, off_t o) { BROKEN(fd, "pread") return NEXT(pread)(fd, to, n, o); }
ssize_t pread64(int fd, void *to, size_t n, off64_t o) { BROKEN(fd, "pread") return NEXT(pread64)(fd, to, n, o); }

/* dlsym itself allocates, so these go to the C library's own names. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
#define NO_MEMORY(bytes, call) if (kind == MEMORY && (bytes) >= least && fails(MEMORY, call))
void *malloc(size_t n) { NO_MEMORY(n, "malloc") { errno = ENOMEM; return NULL; } return __libc_malloc(n); }
void *calloc(size_t a, size_t b) {
    NO_MEMORY(a * b, "calloc") { errno = ENOMEM; return NULL; }
    return __libc_calloc(a, b);
}
void *realloc(void *p, size_t n) { NO_MEMORY(n, "realloc") { errno = ENOMEM; return NULL; } return __libc_realloc(p, n); }
void *memalign(size_t a, size_t n) {
    NO_MEMORY(n, "memalign") { errno = ENOMEM; return NULL; }
    return __libc_memalign(a, n);
}
void *aligned_alloc(size_t a, size_t n) {
    NO_MEMORY(n, "aligned_alloc") { errno = ENOMEM; return NULL; }
    return __libc_memalign(a, n);
}
int posix_memalign(void **to, size_t a, size_t n) {
    NO_MEMORY(n, "posix_memalign") return ENOMEM;
    return (*to = __libc_memalign(a, n)) ? 0 : ENOMEM;
}
void *mmap(void *p, size_t n, int protection, int flags, int fd, off_t o) {
    NO_MEMORY(n, "mmap") { errno = ENOMEM; return MAP_FAILED; }
    return (void *)syscall(SYS_mmap, p, n, protection, flags, fd, o);
}
void *mmap64(void *p, size_t n, int protection, int flags, int fd, off64_t o) {
    NO_MEMORY(n, "mmap") { errno = ENOMEM; return MAP_FAILED; }
    return (void *)syscall(SYS_mmap, p, n, protection, flags, fd, o);
}

/* A second passes as a day, backwards, from a year before 1970. */
static void go_back(struct timespec *now) {
    now->tv_sec = -31536000 - (now->tv_sec - start.tv_sec) * 86400;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (kind == CLOCK && clock == CLOCK_REALTIME && !result) go_back(now);
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
