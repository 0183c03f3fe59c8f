package api

import (
	"context"

	"airlock.dev/airlock"
	"airlock.dev/airlock/api/envd"
	"airlock.dev/airlock/channel"
	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// filesystemService is filesystem.Filesystem on the guest of the context.
type filesystemService struct{}

func entryInfo(e channel.Entry) *envd.EntryInfo {
	info := &envd.EntryInfo{
		Name: e.Name, Path: e.Path, Size: e.Size, Mode: e.Mode, Permissions: e.Permissions, Owner: e.Owner, Group: e.Group,
		ModifiedTime: timestamppb.New(e.ModifiedTime), Metadata: e.Metadata,
	}
	switch e.Type {
	case channel.File:
		info.Type = envd.FileType_FILE_TYPE_FILE
	case channel.Directory:
		info.Type = envd.FileType_FILE_TYPE_DIRECTORY
	}
	if e.SymlinkTarget != "" {
		info.SymlinkTarget = &e.SymlinkTarget
	}
	return info
}

func (filesystemService) Stat(ctx context.Context, req *connect.Request[envd.StatRequest]) (*connect.Response[envd.StatResponse], error) {
	entry, err := guestOf(ctx).Stat(ctx, channel.PathRequest{User: rpcUser(req.Header()), Path: req.Msg.GetPath()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.StatResponse{Entry: entryInfo(entry)}), nil
}

func (filesystemService) MakeDir(ctx context.Context, req *connect.Request[envd.MakeDirRequest]) (*connect.Response[envd.MakeDirResponse], error) {
	entry, err := guestOf(ctx).Mkdir(ctx, channel.PathRequest{User: rpcUser(req.Header()), Path: req.Msg.GetPath()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.MakeDirResponse{Entry: entryInfo(entry)}), nil
}

func (filesystemService) Move(ctx context.Context, req *connect.Request[envd.MoveRequest]) (*connect.Response[envd.MoveResponse], error) {
	entry, err := guestOf(ctx).Move(ctx, channel.MoveRequest{User: rpcUser(req.Header()), Source: req.Msg.GetSource(), Destination: req.Msg.GetDestination()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.MoveResponse{Entry: entryInfo(entry)}), nil
}

func (filesystemService) ListDir(ctx context.Context, req *connect.Request[envd.ListDirRequest]) (*connect.Response[envd.ListDirResponse], error) {
	depth := min(max(int(req.Msg.GetDepth()), defaultDirDepth), maxDirDepth)
	all, err := guestOf(ctx).ListDir(ctx, channel.ListDirRequest{
		PathRequest: channel.PathRequest{User: rpcUser(req.Header()), Path: req.Msg.GetPath()}, Depth: depth,
	})
	if err != nil {
		return nil, err
	}
	reply := &envd.ListDirResponse{Entries: make([]*envd.EntryInfo, len(all))}
	for i, e := range all {
		reply.Entries[i] = entryInfo(e)
	}
	return connect.NewResponse(reply), nil
}

func (filesystemService) Remove(ctx context.Context, req *connect.Request[envd.RemoveRequest]) (*connect.Response[envd.RemoveResponse], error) {
	if err := guestOf(ctx).Remove(ctx, channel.PathRequest{User: rpcUser(req.Header()), Path: req.Msg.GetPath()}); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.RemoveResponse{}), nil
}

var errWatch = airlock.Errorf(airlock.Unimplemented, "watching directories is not supported by this Airlock yet")

func (filesystemService) WatchDir(context.Context, *connect.Request[envd.WatchDirRequest], *connect.ServerStream[envd.WatchDirResponse]) error {
	return errWatch
}

func (filesystemService) CreateWatcher(context.Context, *connect.Request[envd.CreateWatcherRequest]) (*connect.Response[envd.CreateWatcherResponse], error) {
	return nil, errWatch
}

func (filesystemService) GetWatcherEvents(context.Context, *connect.Request[envd.GetWatcherEventsRequest]) (*connect.Response[envd.GetWatcherEventsResponse], error) {
	return nil, errWatch
}

func (filesystemService) RemoveWatcher(context.Context, *connect.Request[envd.RemoveWatcherRequest]) (*connect.Response[envd.RemoveWatcherResponse], error) {
	return nil, errWatch
}
