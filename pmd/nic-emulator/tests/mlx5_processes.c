/*
 * A ConnectX in two processes. The first one creates a send queue in shared memory. The second one receives only two
 * file descriptors, of the memory and of the device. It maps the doorbell page at the offset that the first one names.
 */
#include "mlx5_queues.h"

#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 1 << 20, FRAME = 60, BURST = ENTRIES / 2 };

/* One memory region for all objects, at the same address in both processes. */
static uint8_t *const region = (uint8_t *)0x100000000000;
static size_t used = 65536;

struct shared {
    struct sender sender;
    uint32_t number, key;
    uint64_t page, reg;
};

static void *take(size_t size, void *data)
{
    void *start = region + used;
    (void)data;
    used += (size + 4095) & ~4095UL;
    CHECK(used <= SIZE / 2);
    return size ? start : NULL;
}

static void give(void *start, void *data)
{
    (void)start;
    (void)data;
}

static void map_region(int memory)
{
    CHECK(mmap(region, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, memory, 0) == region);
    buffers = region + SIZE / 2;
}

/* Sends bursts with one doorbell per packet. The last doorbells may be handled after all packets are sent. */
static void send_bursts(struct shared *shared, struct sender *s, int bursts)
{
    for (int burst = 0; burst < bursts; burst++) {
        for (int i = 0; i < BURST; i++)
            post(s, buffers + i * SLOT / 4, FRAME, shared->key, NULL);
        for (int i = 0; i < BURST; i++) {
            volatile struct mlx5_cqe64 *cqe = entry(&s->completions, s->seen);
            CHECK(cqe && cqe->op_own >> 4 == MLX5_CQE_REQ);
            s->seen++;
        }
    }
}

static void pass(int to, const int *descriptors)
{
    char byte = 1, control[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(header), descriptors, 2 * sizeof(int));
    CHECK(sendmsg(to, &message, 0) == 1);
}

static int secondary(int from)
{
    char byte, control[CMSG_SPACE(2 * sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    int descriptors[2];
    CHECK(recvmsg(from, &message, 0) == 1);
    memcpy(descriptors, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(descriptors));
    map_region(descriptors[0]);
    struct shared *shared = (struct shared *)region;
    uint8_t *page = mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, descriptors[1], (off_t)shared->page);
    CHECK(page != MAP_FAILED);
    close(descriptors[1]);
    struct ibv_qp pair = {.qp_num = shared->number};
    struct sender s = shared->sender;
    s.qp = &pair;
    s.queue.bf.reg = page + shared->reg;
    send_bursts(shared, &s, 200);
    shared->sender.next = s.next;
    shared->sender.seen = s.seen;
    return 0;
}

int main(int count, char **arguments)
{
    if (count > 1)
        return secondary(atoi(arguments[1]));
    int memory = memfd_create("queues", 0);
    CHECK(memory >= 0 && ftruncate(memory, SIZE) == 0);
    map_region(memory);
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    context = ibv_open_device(list[0]);
    CHECK(context);
    struct mlx5dv_ctx_allocators allocators = {.alloc = take, .free = give};
    CHECK(mlx5dv_set_context_attr(context, MLX5DV_CTX_ATTR_BUF_ALLOCATORS, &allocators) == 0);
    pd = ibv_alloc_pd(context);
    CHECK(pd);
    mr = ibv_reg_mr(pd, region, SIZE, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct sender s = open_sender();
    struct mlx5dv_qp queue = {.comp_mask = MLX5DV_QP_MASK_UAR_MMAP_OFFSET};
    struct mlx5dv_obj object = {.qp = {s.qp, &queue}};
    CHECK(mlx5dv_init_obj(&object, MLX5DV_OBJ_QP) == 0 && queue.comp_mask & MLX5DV_QP_MASK_UAR_MMAP_OFFSET);
    struct shared *shared = (struct shared *)region;
    *shared = (struct shared){.sender = s, .number = s.qp->qp_num, .key = mr->lkey,
                              .page = (uint64_t)queue.uar_mmap_offset,
                              .reg = (uintptr_t)s.queue.bf.reg & 4095};

    int pair[2], status;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char number[16];
        snprintf(number, sizeof(number), "%d", pair[1]);
        close(pair[0]);
        execl("/proc/self/exe", arguments[0], number, NULL);
        _exit(9);
    }
    close(pair[1]);
    pass(pair[0], (int[]){memory, context->cmd_fd});
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    /* The first process continues where the second one has stopped. */
    CHECK(shared->sender.next == 200 * BURST);
    send_bursts(shared, &shared->sender, 3);
    close_sender(&shared->sender);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    printf("all good\n");
    return 0;
}
