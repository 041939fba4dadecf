/*
 * The clock of a ConnectX by rdma-core: libmlx5 reads the pages of the clock and the time stamps of completions itself.
 * Argument: "pages", or "none" for a kernel that does not map the clock.
 */
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "line %d: %s failed, errno %d\n", __LINE__, #condition, errno);                           \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

static struct ibv_context *context;
static double khz;

static uint64_t now(clockid_t clock)
{
    struct timespec t;
    CHECK(clock_gettime(clock, &t) == 0);
    return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

/* A reading of the device's clock between two of the system's. */
struct reading {
    uint64_t before, ticks, after;
};

static struct reading read_clock(void)
{
    struct reading r;
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    r.before = now(CLOCK_MONOTONIC);
    CHECK(ibv_query_rt_values_ex(context, &values) == 0);
    r.after = now(CLOCK_MONOTONIC);
    CHECK(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK && values.raw_clock.tv_sec == 0);
    r.ticks = values.raw_clock.tv_nsec;
    return r;
}

/* Sends a frame over a queue whose completions have time stamps. */
static void stamped_completion(void)
{
    static char frame[64] __attribute__((aligned(64)));
    struct ibv_cq_init_attr_ex options = {
        .cqe = 16,
        .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
    };
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &options);
    CHECK(pd && cq);
    struct ibv_mr *mr = ibv_reg_mr(pd, frame, sizeof frame, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp_init_attr attr = {
        .send_cq = ibv_cq_ex_to_cq(cq),
        .recv_cq = ibv_cq_ex_to_cq(cq),
        .cap = {.max_send_wr = 16, .max_send_sge = 1},
        .qp_type = IBV_QPT_RAW_PACKET,
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &attr);
    CHECK(mr && qp);
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    CHECK(ibv_modify_qp(qp, &state, IBV_QP_STATE | IBV_QP_PORT) == 0);
    state.qp_state = IBV_QPS_RTR;
    CHECK(ibv_modify_qp(qp, &state, IBV_QP_STATE) == 0);
    state.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(qp, &state, IBV_QP_STATE) == 0);
    for (int i = 0; i < 3; i++) {
        struct ibv_sge part = {.addr = (uintptr_t)frame, .length = sizeof frame, .lkey = mr->lkey};
        struct ibv_send_wr *bad, request = {
            .sg_list = &part, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
        struct reading first = read_clock();
        uint64_t wall = now(CLOCK_REALTIME);
        CHECK(ibv_post_send(qp, &request, &bad) == 0);
        struct ibv_poll_cq_attr poll = {0};
        while (ibv_start_poll(cq, &poll) == ENOENT)
            ;
        struct reading last = read_clock();
        CHECK(cq->status == IBV_WC_SUCCESS);
        uint64_t ticks = ibv_wc_read_completion_ts(cq);
        CHECK(ticks >= first.ticks && ticks <= last.ticks);
        /* The wall clock of the system may be set meanwhile, but hardly by a second. */
        int64_t apart = ibv_wc_read_completion_wallclock_ns(cq) - wall;
        CHECK(llabs(apart) < 1000000000);
        ibv_end_poll(cq);
    }
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 1);
    context = ibv_open_device(list[0]);
    CHECK(context);
    struct ibv_device_attr_ex can;
    CHECK(ibv_query_device_ex(context, NULL, &can) == 0);
    khz = atof(argv[2]);
    CHECK(can.hca_core_clock == khz && can.completion_timestamp_mask != 0);
    const uint64_t both = MLX5DV_CONTEXT_MASK_HCA_CORE_CLOCK | MLX5DV_CONTEXT_MASK_CLOCK_INFO_UPDATE;
    struct mlx5dv_context dv = {.comp_mask = both};
    CHECK(mlx5dv_query_device(context, &dv) == 0);
    struct mlx5dv_clock_info info;
    if (strcmp(argv[1], "none") == 0) {
        struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
        CHECK(ibv_query_rt_values_ex(context, &values) == EOPNOTSUPP);
        CHECK(mlx5dv_get_clock_info(context, &info) == EINVAL);
        CHECK(dv.comp_mask == 0);
    } else {
        CHECK(dv.comp_mask == both);
        CHECK(dv.hca_core_clock && dv.max_clock_info_update_nsec > 1000000000);
        struct reading first = read_clock();
        struct timespec wait = {.tv_nsec = 50000000};
        nanosleep(&wait, NULL);
        struct reading last = read_clock();
        /* The frequency, as exact as the readings of the system's clock allow. */
        double ticks = last.ticks - first.ticks;
        CHECK(ticks <= (last.after - first.before) * khz / 1e6 + 1);
        CHECK(ticks >= (last.before - first.after) * khz / 1e6 - 1);
        for (int i = 0; i < 3; i++) {
            CHECK(mlx5dv_get_clock_info(context, &info) == 0);
            uint64_t before = now(CLOCK_REALTIME);
            struct reading it = read_clock();
            uint64_t after = now(CLOCK_REALTIME);
            uint64_t time = mlx5dv_ts_to_ns(&info, it.ticks);
            /* The wall clock may be slewed against the monotonic one since the program began. */
            CHECK(time + 1000000 >= before && time <= after + 1000000);
        }
        stamped_completion();
    }
    CHECK(ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    puts("all good");
    return 0;
}
