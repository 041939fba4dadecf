/*
 * A ConnectX with the direct verbs of libmlx5, built with the headers of the distribution. The queues are in memory of
 * this program, which writes descriptors and reads completions itself. It sends over a looped link, then tests errors.
 */
#include "mlx5_queues.h"

enum { FRAME = 100 };

static unsigned allocations;

static void *take(size_t size, void *data)
{
    (void)data;
    if (size == 0)
        return NULL;
    allocations++;
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void give(void *start, void *data)
{
    (void)data;
    /* The size is unknown; the pages stay mapped until the program ends. */
    if (start)
        allocations--;
}

static void wrong_index(uint32_t *wqe) { wqe[0] = htobe32(77 << 8 | MLX5_OPCODE_SEND); }
static void wrong_opcode(uint32_t *wqe) { wqe[0] = htobe32(be32toh(wqe[0]) | 0x7f); }
static void no_segments(uint32_t *wqe) { wqe[1] = htobe32(be32toh(wqe[1]) & ~0x3fU); }
static void too_many_segments(uint32_t *wqe) { wqe[1] = htobe32(be32toh(wqe[1]) | 0x3f); }
static void inline_beyond(uint32_t *wqe) { wqe[7] = htobe32(1000 << 16); }

/* Posts an invalid descriptor: it completes with the syndrome, and the next descriptor is flushed. */
static void refused(void *frame, uint32_t length, uint32_t lkey, void (*wrong)(uint32_t *), int syndrome)
{
    struct sender s = open_sender();
    post(&s, frame, length, lkey, wrong);
    volatile struct mlx5_err_cqe *error = (void *)entry(&s.completions, 0);
    CHECK(error);
    CHECK(error->op_own >> 4 == MLX5_CQE_REQ_ERR);
    CHECK(error->syndrome == syndrome);
    CHECK(be16toh(error->wqe_counter) == 0);
    post(&s, buffers, FRAME, mr->lkey, NULL);
    error = (void *)entry(&s.completions, 1);
    CHECK(error && error->op_own >> 4 == MLX5_CQE_REQ_ERR && error->syndrome == MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
    /* After a reset the queue works again, with counters from zero. */
    move(s.qp, IBV_QPS_RESET, 0);
    close_sender(&s);
}

int main(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count == 1 && mlx5dv_is_supported(list[0]));
    context = ibv_open_device(list[0]);
    CHECK(context);
    struct mlx5dv_context can = {.comp_mask = MLX5DV_CONTEXT_MASK_CQE_COMPRESION | MLX5DV_CONTEXT_MASK_STRIDING_RQ};
    CHECK(mlx5dv_query_device(context, &can) == 0);
    CHECK(can.flags & MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW);
    CHECK(can.cqe_comp_caps.max_num > 1 && can.striding_rq_caps.max_single_wqe_log_num_of_strides > 0);
    struct mlx5dv_ctx_allocators allocators = {.alloc = take, .free = give};
    CHECK(mlx5dv_set_context_attr(context, MLX5DV_CTX_ATTR_BUF_ALLOCATORS, &allocators) == 0);
    pd = ibv_alloc_pd(context);
    CHECK(pd);
    buffers = mmap(NULL, 2 * ENTRIES * SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(buffers != MAP_FAILED);
    mr = ibv_reg_mr(pd, buffers, 2 * ENTRIES * SLOT, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    struct ibv_pd *other_pd = ibv_alloc_pd(context);
    struct ibv_mr *other_mr = ibv_reg_mr(other_pd, buffers, SLOT, IBV_ACCESS_LOCAL_WRITE);
    CHECK(other_pd && other_mr);

    /* A receive queue with compressed completions, an RSS hash over UDP, and a rule. */
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = ENTRIES - 1};
    struct mlx5dv_cq_init_attr dv = {.comp_mask = MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE,
                                     .cqe_comp_res_format = MLX5DV_CQE_RES_FORMAT_HASH};
    struct ibv_cq *rcq = ibv_cq_ex_to_cq(mlx5dv_create_cq(context, &cq_attr, &dv));
    CHECK(rcq);
    struct ibv_wq_init_attr wq_attr = {.wq_type = IBV_WQT_RQ, .max_wr = ENTRIES, .max_sge = 1, .pd = pd, .cq = rcq};
    struct ibv_wq *wq = ibv_create_wq(context, &wq_attr);
    CHECK(wq);
    struct ibv_wq_attr ready = {.attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY};
    CHECK(ibv_modify_wq(wq, &ready) == 0);
    struct ibv_rwq_ind_table_init_attr table_attr = {.log_ind_tbl_size = 0, .ind_tbl = &wq};
    struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(context, &table_attr);
    CHECK(table);
    uint8_t key[40] = {0x6d, 0x5a, 0x56, 0xda};
    struct ibv_qp_init_attr_ex rss = {
        .qp_type = IBV_QPT_RAW_PACKET, .pd = pd, .rwq_ind_tbl = table,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
        .rx_hash_conf = {.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
                         .rx_hash_key_len = sizeof key, .rx_hash_key = key,
                         .rx_hash_fields_mask = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4 | IBV_RX_HASH_SRC_PORT_UDP |
                                                IBV_RX_HASH_DST_PORT_UDP}};
    rss.rx_hash_conf.rx_hash_key_len = 39;
    CHECK(!ibv_create_qp_ex(context, &rss) && errno == EINVAL);
    rss.rx_hash_conf.rx_hash_key_len = sizeof key;
    rss.rx_hash_conf.rx_hash_fields_mask |= IBV_RX_HASH_SRC_IPV6;
    CHECK(!ibv_create_qp_ex(context, &rss) && errno == EINVAL);
    rss.rx_hash_conf.rx_hash_fields_mask &= ~(uint64_t)IBV_RX_HASH_SRC_IPV6;
    struct ibv_qp *tir = ibv_create_qp_ex(context, &rss);
    CHECK(tir);
    struct {
        struct ibv_flow_attr attr;
        struct ibv_flow_spec_eth eth;
        struct ibv_flow_spec_ipv4 ip;
        struct ibv_flow_spec_tcp_udp udp;
        struct ibv_flow_spec_action_tag tag;
    } __attribute__((packed, aligned(8))) rule = {
        .attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof rule, .num_of_specs = 4, .port = 1},
        .eth = {.type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.eth},
        .ip = {.type = IBV_FLOW_SPEC_IPV4, .size = sizeof rule.ip},
        .udp = {.type = IBV_FLOW_SPEC_UDP, .size = sizeof rule.udp},
        .tag = {.type = IBV_FLOW_SPEC_ACTION_TAG, .size = sizeof rule.tag, .tag_id = 0xabcde}};
    struct ibv_flow *flow = ibv_create_flow(tir, (void *)&rule);
    CHECK(flow);
    struct mlx5dv_rwq receive;
    struct mlx5dv_cq arrivals;
    struct mlx5dv_obj object = {.rwq = {wq, &receive}, .cq = {rcq, &arrivals}};
    CHECK(mlx5dv_init_obj(&object, MLX5DV_OBJ_RWQ | MLX5DV_OBJ_CQ) == 0);
    CHECK(receive.wqe_cnt == ENTRIES && receive.stride == 16 && arrivals.cqe_cnt == ENTRIES);
    for (unsigned i = 0; i < ENTRIES; i++) {
        struct mlx5_wqe_data_seg *segment = (void *)((uint8_t *)receive.buf + i * receive.stride);
        mlx5dv_set_data_seg(segment, SLOT, mr->lkey, (uintptr_t)(buffers + (ENTRIES + i) * SLOT));
    }
    __sync_synchronize();
    receive.dbrec[MLX5_RCV_DBR] = htobe32(ENTRIES);

    /* A single frame: complete, with length, tag, header types and checksum results in its completion. */
    for (unsigned i = 0; i < ENTRIES; i++) {
        static const uint8_t header[] = {2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0,
                                         0x45, 0, 0, FRAME - 14, 0, 7, 0x40, 0, 64, 17, 0, 0,
                                         198, 18, 0, 1, 198, 18, 0, 2,
                                         0x30, 0x39, 0, 9, 0, FRAME - 34, 0, 0};
        memcpy(buffers + i * SLOT, header, sizeof header);
        for (unsigned at = sizeof header; at < FRAME; at++)
            buffers[i * SLOT + at] = (uint8_t)(at * 3 + i);
    }
    struct sender s = open_sender();
    for (unsigned i = 0; i < ENTRIES; i++) {
        post(&s, buffers + i * SLOT, FRAME, mr->lkey, NULL);
        volatile struct mlx5_cqe64 *done = entry(&s.completions, i);
        CHECK(done && done->op_own >> 4 == MLX5_CQE_REQ && be16toh(done->wqe_counter) == i);
        CHECK((be32toh(done->sop_drop_qpn) & 0xffffff) == s.qp->qp_num);
        volatile struct mlx5_cqe64 *came = entry(&arrivals, i);
        CHECK(came && came->op_own >> 4 == MLX5_CQE_RESP_SEND);
        CHECK(be32toh(came->byte_cnt) == FRAME && be16toh(came->wqe_counter) == i);
        CHECK((be32toh(came->sop_drop_qpn) & 0xffffff) == 0xabcde);
        CHECK((came->l4_hdr_type_etc >> 4 & 7) == 2 && (came->l4_hdr_type_etc >> 2 & 3) == 2);
        CHECK(came->hds_ip_ext & 4 && !(came->hds_ip_ext & 2));
        CHECK(memcmp(buffers + (ENTRIES + i) * SLOT, buffers + i * SLOT, FRAME) == 0);
    }
    /* No receive descriptor is posted: the next packet is lost, but its transmission completes. */
    post(&s, buffers, FRAME, mr->lkey, NULL);
    CHECK(entry(&s.completions, ENTRIES));
    close_sender(&s);

    refused(buffers, FRAME, mr->lkey, wrong_index, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
    refused(buffers, FRAME, mr->lkey, wrong_opcode, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
    refused(buffers, FRAME, mr->lkey, no_segments, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
    refused(buffers, FRAME, mr->lkey, too_many_segments, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
    refused(buffers, FRAME, mr->lkey, inline_beyond, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
    refused(buffers, 5, mr->lkey, NULL, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
    refused(buffers, FRAME, mr->lkey + 0x100000, NULL, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
    refused(buffers, FRAME, other_mr->lkey, NULL, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
    refused(buffers + 2 * ENTRIES * SLOT - 10, FRAME, mr->lkey, NULL, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);

    CHECK(ibv_destroy_flow(flow) == 0 && ibv_destroy_qp(tir) == 0 && ibv_destroy_rwq_ind_table(table) == 0);
    CHECK(ibv_destroy_wq(wq) == 0 && ibv_destroy_cq(rcq) == 0);
    CHECK(allocations == 0);
    CHECK(ibv_dereg_mr(other_mr) == 0 && ibv_dereg_mr(mr) == 0);
    CHECK(ibv_dealloc_pd(other_pd) == 0 && ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    puts("all good");
    return 0;
}
