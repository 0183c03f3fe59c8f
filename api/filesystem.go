package api

import (
	"context"
	"errors"
	"io"
	"net/http"

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

// The events of a watch are named as fsnotify names them, which E2B uses.
var changeTypes = map[channel.ChangeType]envd.EventType{
	channel.Created:     envd.EventType_EVENT_TYPE_CREATE,
	channel.Written:     envd.EventType_EVENT_TYPE_WRITE,
	channel.Removed:     envd.EventType_EVENT_TYPE_REMOVE,
	channel.Renamed:     envd.EventType_EVENT_TYPE_RENAME,
	channel.ModeChanged: envd.EventType_EVENT_TYPE_CHMOD,
}

func fileEvent(e channel.WatchEvent) *envd.FilesystemEvent {
	event := &envd.FilesystemEvent{Name: e.Name, Type: changeTypes[e.Type]}
	if e.Entry != nil {
		event.Entry = entryInfo(*e.Entry)
	}
	return event
}

// WatchDir sends what happens in a directory until the client leaves. When
// the directory itself is gone the stream ends.
func (filesystemService) WatchDir(ctx context.Context, req *connect.Request[envd.WatchDirRequest], stream *connect.ServerStream[envd.WatchDirResponse]) error {
	g := guestOf(ctx)
	m := req.Msg
	watch, err := g.Watch(ctx, rpcUser(req.Header()), channel.WatchCommand{Path: m.GetPath(), Recursive: m.GetRecursive(), Entry: m.GetIncludeEntry()})
	if err != nil {
		return err
	}
	defer watch.Close()
	err = stream.Send(&envd.WatchDirResponse{Event: &envd.WatchDirResponse_Start{Start: &envd.WatchDirResponse_StartEvent{}}})
	for err == nil {
		silence, cancel := context.WithTimeout(ctx, pingInterval(req.Header()))
		var e channel.WatchEvent
		e, err = watch.Next(silence)
		cancel()
		switch {
		case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
			err = stream.Send(&envd.WatchDirResponse{Event: &envd.WatchDirResponse_Keepalive{Keepalive: &envd.WatchDirResponse_KeepAlive{}}})
		case err == nil:
			err = stream.Send(&envd.WatchDirResponse{Event: &envd.WatchDirResponse_Filesystem{Filesystem: fileEvent(e)}})
		}
	}
	if err == io.EOF {
		return nil
	}
	select {
	case <-g.Gone():
		panic(http.ErrAbortHandler) // see finish
	default:
		return err
	}
}

func (filesystemService) CreateWatcher(ctx context.Context, req *connect.Request[envd.CreateWatcherRequest]) (*connect.Response[envd.CreateWatcherResponse], error) {
	m := req.Msg
	id, err := guestOf(ctx).WatchPolled(ctx, rpcUser(req.Header()), channel.WatchCommand{Path: m.GetPath(), Recursive: m.GetRecursive(), Entry: m.GetIncludeEntry()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.CreateWatcherResponse{WatcherId: id}), nil
}

func (filesystemService) GetWatcherEvents(ctx context.Context, req *connect.Request[envd.GetWatcherEventsRequest]) (*connect.Response[envd.GetWatcherEventsResponse], error) {
	events, err := guestOf(ctx).Polled(ctx, req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	reply := &envd.GetWatcherEventsResponse{}
	for _, e := range events {
		reply.Events = append(reply.Events, fileEvent(e))
	}
	return connect.NewResponse(reply), nil
}

func (filesystemService) RemoveWatcher(ctx context.Context, req *connect.Request[envd.RemoveWatcherRequest]) (*connect.Response[envd.RemoveWatcherResponse], error) {
	if err := guestOf(ctx).Unwatch(req.Msg.GetWatcherId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.RemoveWatcherResponse{}), nil
}
