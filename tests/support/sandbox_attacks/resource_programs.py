"""C++ programs of `resource_attacks`."""

from __future__ import annotations

SPARSE_PAGE_TABLES = r"""
#include <sys/mman.h>
#include <unistd.h>
int main() {
    for (int child = 0; child < 8; child++) if (fork() == 0) break;
    // One page in each gigabyte: a page table and a page directory each, for one page of address space.
    for (unsigned long index = 1; index < 60000; index++) {
        void* address = (void*)(index << 30);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        if (mmap(address, 4096, PROT_READ, flags, -1, 0) == address) *(volatile char*)address;
    }
    sleep(1);
}
"""
PAGE_TABLES = r"""
#include <sys/mman.h>
#include <unistd.h>
int main() {
    unsigned long part = 1UL << 34, step = 1UL << 21;
    for (int count = 0; count < 96; count++) {
        char* memory = (char*)mmap(0, part, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) break;
        madvise(memory, part, MADV_NOHUGEPAGE);
        for (unsigned long at = 0; at < part; at += step) *(volatile char*)(memory + at);
    }
    sleep(1);
}
"""
STACK = r"""
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
int main() {
    unsigned long size = 3UL << 30;
    struct rlimit most;
    getrlimit(RLIMIT_STACK, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_STACK, &most);
    char* memory = (char*)mmap(0, size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) for (unsigned long at = 0; at < size; at += 4096) memory[at] = 1;
    sleep(1);
}
"""
MANY_MAPPINGS = r"""
#include <sys/mman.h>
#include <string.h>
#include <unistd.h>
int main() {
    // The first processes have as many mappings as the kernel allows; the others then allocate memory.
    for (int child = 0; child < 12; child++) if (fork() == 0) {
        char* memory = (char*)mmap(0, 65000 * 4096UL, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (long page = 0; page < 65000; page += 2) mprotect(memory + page * 4096, 4096, PROT_NONE);
        sleep(1);
    }
    usleep(400000);
    for (int child = 0; child < 16; child++) if (fork() == 0) {
        unsigned long size = 190UL << 20;
        char* memory = (char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED) memset(memory, 1, size);
        sleep(1);
    }
    sleep(1);
}
"""
PARALLEL_PRIVATE = r"""
#include <sys/mman.h>
#include <string.h>
#include <unistd.h>
int main() {
    for (int child = 0; child < 15; child++) if (fork() == 0) break;
    unsigned long size = 200UL << 20;
    char* memory = (char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) memset(memory, 1, size);
    sleep(1);
}
"""

# After the first thread has ended, its folder in /proc shows neither memory nor descriptors of the process.
FIRST_THREAD_ENDED = r"""
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static void* allocate(void*) {
    unsigned long size = 150UL << 20;
    usleep(50000);
    char* memory = (char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) memset(memory, 1, size);
    sleep(1);
    _exit(0);
}
int main() {
    for (int child = 0; child < 15; child++) if (fork() == 0) break;
    pthread_t thread;
    pthread_create(&thread, 0, allocate, 0);
    pthread_exit(0);
}
"""
# Threads with a separate descriptor table, which the folders of their process in /proc do not show.
OWN_DESCRIPTORS = r"""
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static char buffer[1 << 20];
WORK
int main() {
    close(3);
    for (int count = 0; count < THREADS; count++) {
        char* stack = (char*)malloc(65536);
        clone(work, stack + 65536, CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_FS, 0);
    }
    sleep(2);
}
"""
SOCKETS_OF_THREADS = OWN_DESCRIPTORS.replace("THREADS", "40").replace(
    "WORK",
    """
static int work(void*) {
    int pair[2];
    for (int count = 0; count < 120 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0; count++)
        for (int end = 0; end < 2; end++) {
            fcntl(pair[end], F_SETFL, O_NONBLOCK);
            while (write(pair[end], buffer, 32768) > 0) {}
        }
    for (;;) pause();
}
""",
)
FILES_OF_THREADS = OWN_DESCRIPTORS.replace("THREADS", "1").replace(
    "WORK",
    """
static int work(void*) {
    for (int count = 0; count < 100; count++) {
        int file = open("x", O_CREAT | O_WRONLY, 0600);
        unlink("x");
        for (int part = 0; part < 8; part++) if (write(file, buffer, sizeof buffer) <= 0) break;
    }
    for (;;) pause();
}
""",
)
