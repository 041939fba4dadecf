/*
 * Direct access to queues of a ConnectX with the direct verbs of libmlx5, shared by the programs of this folder.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno);                                           \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { ENTRIES = 64, SLOT = 2048 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t *buffers;

struct sender {
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct mlx5dv_qp queue;
    struct mlx5dv_cq completions;
    unsigned next, seen;
};

/* Waits at most five seconds for the entry at a consumer counter; returns NULL if it does not arrive. */
static volatile struct mlx5_cqe64 *entry(struct mlx5dv_cq *cq, unsigned counter)
{
    volatile struct mlx5_cqe64 *cqe = (void *)((uint8_t *)cq->buf + (counter & (cq->cqe_cnt - 1)) * cq->cqe_size);
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += 5;
    do {
        uint8_t owner = cqe->op_own;
        if (owner >> 4 != MLX5_CQE_INVALID && (owner & 1) == !!(counter & cq->cqe_cnt)) {
            __sync_synchronize();
            cq->dbrec[0] = htobe32((counter + 1) & 0xffffff);
            return cqe;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < end.tv_sec);
    return NULL;
}

static void move(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
    struct ibv_qp_attr attr = {.qp_state = state, .port_num = 1};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask) == 0);
}

static struct sender open_sender(void)
{
    struct sender s = {.cq = ibv_create_cq(context, ENTRIES - 1, NULL, NULL, 0)};
    CHECK(s.cq);
    struct ibv_qp_init_attr attr = {
        .send_cq = s.cq, .recv_cq = s.cq, .qp_type = IBV_QPT_RAW_PACKET,
        .cap = {.max_send_wr = ENTRIES, .max_send_sge = 1}};
    s.qp = ibv_create_qp(pd, &attr);
    CHECK(s.qp);
    move(s.qp, IBV_QPS_INIT, IBV_QP_PORT);
    move(s.qp, IBV_QPS_RTR, 0);
    move(s.qp, IBV_QPS_RTS, 0);
    struct mlx5dv_obj object = {.qp = {s.qp, &s.queue}, .cq = {s.cq, &s.completions}};
    CHECK(mlx5dv_init_obj(&object, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ) == 0);
    CHECK(s.queue.sq.stride == 64 && s.queue.sq.wqe_cnt >= ENTRIES && s.queue.rq.wqe_cnt == 0);
    CHECK(s.completions.cqe_cnt == ENTRIES && s.completions.cqe_size == 64);
    return s;
}

static void close_sender(struct sender *s)
{
    CHECK(ibv_destroy_qp(s->qp) == 0 && ibv_destroy_cq(s->cq) == 0);
}

/* Posts one frame by pointer; `wrong` changes the descriptor before the doorbell. */
static void post(struct sender *s, void *frame, uint32_t length, uint32_t lkey, void (*wrong)(uint32_t *))
{
    uint32_t *wqe = (uint32_t *)((uint8_t *)s->queue.sq.buf + (s->next & (s->queue.sq.wqe_cnt - 1)) * 64);
    memset(wqe, 0, 64);
    wqe[0] = htobe32((s->next & 0xffff) << 8 | MLX5_OPCODE_SEND);
    wqe[1] = htobe32(s->qp->qp_num << 8 | 3);
    wqe[2] = htobe32(MLX5_WQE_CTRL_CQ_UPDATE);
    wqe[8] = htobe32(length);
    wqe[9] = htobe32(lkey);
    wqe[10] = htobe32((uint64_t)(uintptr_t)frame >> 32);
    wqe[11] = htobe32((uint32_t)(uintptr_t)frame);
    if (wrong)
        wrong(wqe);
    s->next++;
    __sync_synchronize();
    s->queue.dbrec[MLX5_SND_DBR] = htobe32(s->next & 0xffff);
    __sync_synchronize();
    *(volatile uint64_t *)s->queue.bf.reg = *(uint64_t *)wqe;
    __sync_synchronize();
}
